/* The fast path of a guard program.
 *
 *     fast  := shape* root* word* tensor* rest*
 *     root  := argument i is this object
 *     word  := the 64 bits at this address are these
 *     rest  := an instruction evaluated as usual
 *
 * Most guards of a large model are about objects that stay where they are: the type of a module,
 * its __dict__, the version of each dict.  Once a call was accepted, each such guard is one memory
 * word, and checking thousands of them is one loop over an array.  A word may be read because the
 * words before it hold: they say that the object whose memory it is in is still referred to by the
 * object before it on the path.  An equal pointer does not say that the object is the same one as
 * before, so whatever a guard says about it is a word again; only comparisons with objects that the
 * program owns are left out.
 *
 * A slot is `stable` if words fix the pointer in it.  An instruction that finds another object at
 * every call is marked volatile after the second time, and then it and all that depends on it
 * belong to the rest.
 */
#ifndef MAGJIT_GUARD_FAST_H
#define MAGJIT_GUARD_FAST_H

#include "guard.h"

typedef uint64_t __attribute__((may_alias)) raw64;

typedef struct {
    const raw64 *address;
    uint64_t expected;
} word;

typedef struct {
    int32_t instr;
    uint64_t version; /* of a block's dict when it last held */
} rest_instr;

typedef struct {
    const tensor_meta *meta;
    PyObject *tensor;
    int32_t instr;
} tensor_check;

typedef struct {
    PyObject *object;
    int32_t argument, instr;
} root_check;

#define LIST(type)      \
    struct {            \
        Py_ssize_t n;   \
        Py_ssize_t cap; \
        type *item;     \
    }

struct fast_path {
    LIST(int32_t) shape;
    LIST(root_check) roots;
    LIST(word) words;
    LIST(int32_t) origins; /* instruction of each word */
    LIST(tensor_check) tensors;
    LIST(rest_instr) rest;
    PyObject **slots;
    int32_t suspect; /* found another object in the last check, or -1 */
};

/* Stands in for the version of a dict that has none: never equal. */
extern const raw64 mj_never;

#endif /* MAGJIT_GUARD_FAST_H */
