/* Values of tensors that a replay reads between two regions (magjit.decisions). */
#ifndef MAGJIT_READING_H
#define MAGJIT_READING_H

#include "magjit.h"

/* How often anything ran in this process, in replays, that may change a tensor's data without a
 * trace in its version: what no record served, a record that is not pure, Python code between two
 * regions.  Never how often nothing else did. */
extern unsigned long long mj_effects;

/* What one replay has on the host of a tensor on a device. */
typedef struct {
    PyObject *copy;   /* what the reader made, or NULL */
    PyObject *holder; /* copy.holder: of which the copy is */
    unsigned long long effects; /* when it was made */
} read_state;

/* function(tensor), where the reader is for it: 1, a new reference in *number; 0: do it as always;
 * -1: it raises.  The first `held` of the values are those of the frames. */
int mj_read(read_state *state, PyObject *function, PyObject *tensor, PyObject *values,
            Py_ssize_t held, PyObject **number);
/* Whether a function is one that the reader is for, of a tensor. */
bool mj_reads(PyObject *function);
/* The next region gets these values: what it does not hold it may do anything with. */
void mj_read_keep(read_state *state, PyObject *const *values, Py_ssize_t n);
void mj_read_clear(read_state *state);

/* Whether the truth of an object is found without Python code. */
bool mj_is_plain(PyObject *object);
/* Whether an iterator gives its next item without Python code: one of a list, an enumeration of it
 * and the like. */
bool mj_is_plain_iterator(PyObject *iterator);

#endif /* MAGJIT_READING_H */
