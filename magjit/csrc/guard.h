/* Guard programs: what the C files of the guard layer share.
 *
 * A program is a flat array of instructions over numbered slots.  Each slot is written by exactly
 * one instruction that precedes every reader, so a program is a DAG written in evaluation order:
 *
 *     program  := instr*
 *     instr    := root | fetch | check | block
 *     root     := arg | kwarg | argc | const | weak | globals
 *     fetch    := dict | getitem | index | cell | slot | ...    dst := part of src, else fail
 *     check    := is | type_is | eq | len | keys | tensor | ...
 *     block    := dict_block n (fetch from that dict | leaf check){n}
 *                 skipped as long as the dict's version is the one with which it last held
 *
 * Nothing here runs user code: no __eq__, no __hash__, no descriptor, no finaliser; but for a
 * backend's predicates, which come last and find every slot held by a reference.  Slots hold
 * borrowed pointers; they are alive because everything on the path to them is, and because nothing
 * can run between a check and the moment when the caller takes its own references.
 */
#ifndef MAGJIT_GUARD_H
#define MAGJIT_GUARD_H

#include "magjit.h"

typedef enum {
    /* roots */
    G_ARG,
    G_KWARG,
    G_ARGC,
    G_KWARG_ORDER,
    G_CONST,
    G_GLOBALS,
    G_WEAK,
    /* fetches */
    G_DICT,
    G_MODULE_DICT,
    G_GETITEM,
    G_ABSENT,
    G_INDEX,
    G_ODICT_KEY,
    G_CELL,
    G_CELL_EMPTY,
    G_CLOSURE,
    G_FUNC_GLOBALS,
    G_FUNC_DEFAULTS,
    G_FUNC_KWDEFAULTS,
    G_METHOD_FUNC,
    G_METHOD_SELF,
    G_TYPE,
    G_SLOT,
    G_SLOT_EMPTY,
    G_TP_ATTR,
    G_GETATTR_C,
    G_WEAKREF_CALL,
    G_CONTEXT_VALUE,
    G_CONTEXT_UNSET,
    /* checks */
    G_IS,
    G_IS_NOT,
    G_TYPE_IS,
    G_EQ,
    G_LEN,
    G_KEYS,
    G_SET_EQ,
    G_SAME,
    G_DISTINCT,
    G_DIFFER,
    G_TP_NAMES,
    G_FUNC_CODE,
    G_TENSOR,
    G_NO_OVERLAP,
    G_OVERLAP,
    G_GLOBAL_STATE,
    G_SIZES,
    G_PYEQ,
    G_PREDICATE,
    /* blocks */
    G_DICT_BLOCK,
    G_COUNT
} guard_op;

typedef enum { V_UNKNOWN = -1, V_NO = 0, V_YES = 1 } verdict;

typedef struct tensor_meta tensor_meta;
typedef struct global_state global_state;
typedef struct type_names type_names;
typedef struct fast_path fast_path;

/* A list of slots that an instruction reads. */
typedef struct {
    Py_ssize_t n;
    int32_t slot[];
} slot_list;

typedef struct {
    uint8_t op;
    uint8_t flags;
    int32_t dst; /* slot written, or -1 */
    int32_t src; /* slot read, or -1 */
    int32_t n;   /* index, length, second slot or number of instructions in a block */
    PyObject *obj;
    union {
        Py_hash_t hash;   /* of obj, where obj is a dict key */
        uint64_t version; /* of the dict when a block last held; 0: unknown */
        PyObject *obj2;
        slot_list *slots;
        tensor_meta *meta;
        global_state *state;
        type_names *names;
    } u;
} guard_instr;

enum {
    GF_TYPE_IN_SLOT = 1, /* tp_names: the type is in slot src, not in obj */
    GF_ORDERED = 2,      /* dict_block: some instruction depends on the order of the keys */
    GF_CHANGED = 4,      /* found another object than before, once */
    GF_VOLATILE = 8,     /* and again */
    GF_IN_REST = 16,     /* of the fast path: evaluated by itself, also if it stands in a block */
    GF_DICT = 32,        /* of the fast path: fetches a dict */
    GF_ODICT = 64,       /* of the fast path: the block's order is that of an OrderedDict */
};

/* A call as a vectorcall sees it. */
typedef struct {
    PyObject *const *args;
    Py_ssize_t nargs;
    PyObject *kwnames; /* NULL or a tuple of str; the values follow the positional arguments */
} guard_call;

typedef struct {
    PyObject_HEAD
    guard_instr *code;
    Py_ssize_t n_instrs;
    Py_ssize_t n_slots;
    Py_ssize_t n_temps; /* new references to be held for a call, at most */
    bool runs_python;   /* ends with predicates */
    PyObject **slots;   /* the slots; those of a skipped block keep their last value */
    bool *written;      /* by slot: some instruction writes it */
    PyObject **temps;
    bool busy;        /* the slots are in use */
    uint8_t accepted; /* number of accepted calls, as far as it matters */
    fast_path *fast;  /* NULL: not built */
} guard_program;

/* One evaluation.  `slots` is valid from a successful mj_program_enter until mj_program_leave; the
 * caller must take its own references in between and must not run any other code. */
typedef struct {
    guard_program *program;
    const guard_call *call;
    PyObject **slots;
    PyObject **temps;
    Py_ssize_t n_temps;
    bool pinned;        /* all slots are held, too */
    bool private_slots; /* they are freed with the run */
    bool cache;         /* block versions may be used and stored */
    Py_ssize_t failed;
} guard_run;

extern PyTypeObject mj_program_type;

/* True: the call satisfies the guards, `run->slots` is filled.  False: run->failed is the
 * instruction's index, or -1 when memory ran out (nothing to leave, no exception set). */
bool mj_program_enter(guard_program *program, const guard_call *call, guard_run *run);
void mj_program_leave(guard_run *run);

/* guard_exec.c: index of the first failing instruction, or -1. */
Py_ssize_t mj_guard_execute(guard_run *run, Py_ssize_t from, Py_ssize_t to);

int mj_guard_fetch_init(void);
/* What to store as the version of a block that held; 0 if the version would not show every change.
 */
uint64_t mj_block_version(const guard_instr *block, PyObject *dict);

PyObject **mj_instance_dict_address(PyObject *obj); /* NULL: not at a fixed place in the object */
bool mj_guard_check_one(guard_run *run, guard_instr *in); /* any instruction but a block */

/* guard_fast.c: the program as one list of memory words that must not change. */
verdict mj_fast_check(guard_program *program, guard_run *run);
void mj_fast_build(guard_program *program, const guard_run *run);
void mj_fast_free(fast_path *fast);
PyObject *mj_fast_describe(const fast_path *fast);

/* guard_parse.c */
int mj_guard_parse(guard_program *program, PyObject *instrs);

/* guard_value.c: comparisons and look-ups that never run user code. */
/* Same exact type and same value; V_UNKNOWN for types whose comparison is not known to be free of
 * user code. */
verdict mj_value_eq(PyObject *a, PyObject *b);
/* V_YES: *value is borrowed; V_NO: no such key; V_UNKNOWN: only user code could tell. */
verdict mj_dict_get(PyObject *dict, PyObject *key, Py_hash_t hash, PyObject **value);
#if MJ_PY313
/* Where an attribute of an object is that keeps its values in itself: addresses of what says so. */
typedef struct {
    const void *keys, *values, *names;
    const void *value; /* NULL: none of the names */
} inline_attribute;

bool mj_inline_attribute(PyObject *dict, PyObject *key, inline_attribute *found);
#endif

/* Of an OrderedDict: changes with every change of its order, which is not part of its version; else
 * NULL. */
const void *mj_odict_state(PyObject *dict);
bool mj_dict_keys_are(PyObject *dict, PyObject *keys);
PyObject *mj_dict_key_at(PyObject *dict,
                         Py_ssize_t index); /* borrowed, NULL if out of range or not knowable */
bool mj_set_is(PyObject *set, PyObject *expected); /* expected: {element: element} */
/* Types of torch whose C comparison is safe (torch.device) or that compare as tuples (torch.Size).
 */
void mj_value_set_torch_types(PyTypeObject *device, PyTypeObject *size);
int mj_value_init(void);

/* guard_types.c: class attribute look-ups. */
uint32_t mj_type_version(PyTypeObject *type); /* 0: none */
type_names *mj_type_names_new(PyObject *pairs);
void mj_type_names_free(type_names *names);
int mj_type_names_traverse(type_names *names, visitproc visit, void *arg);
bool mj_type_names_check(type_names *names, PyTypeObject *type);

/* tensor_meta.c */
tensor_meta *mj_meta_parse(PyObject *tuple);
void mj_meta_free(tensor_meta *meta);
int mj_meta_traverse(tensor_meta *meta, visitproc visit, void *arg);
bool mj_meta_check(const tensor_meta *meta, PyObject *tensor);
/* Half-open range of the bytes that the tensor's elements lie in; false if not known. */
bool mj_tensor_range(PyObject *tensor, uintptr_t *first, uintptr_t *last);
/* 0: share no byte; 1: their byte ranges meet, *distance is from a's first element to b's; -1: not
 * known. */
int mj_tensor_relation(PyObject *a, PyObject *b, int64_t *distance);
int mj_init_tensor_meta(PyObject *module);

typedef struct {
    int64_t n, offset;
    const int64_t *sizes, *strides; /* strides: NULL where the layout has none */
} tensor_dims;

/* False where only user code knows them. */
bool mj_tensor_dims(PyObject *tensor, tensor_dims *dims);

/* guard_sizes.c */
/* A condition on the sizes of that many tensors, as bytes; NULL, perhaps with an exception set. */
PyObject *mj_sizes_parse(PyObject *items, Py_ssize_t n_tensors);
bool mj_sizes_hold(const guard_run *run, const guard_instr *in);

/* guard_global.c */
global_state *mj_state_parse(PyObject *given); /* NULL: the state of now */
void mj_state_free(global_state *state);
int mj_state_traverse(global_state *state, visitproc visit, void *arg);
bool mj_state_check(global_state *state);
int mj_init_global_state(PyObject *module);

/* ---- the version of a dict: changes with every change of the dict's contents ---- */
static inline uint64_t
mj_dict_version(PyObject *dict)
{
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#endif
    PyDictObject *d = (PyDictObject *)dict;
#if MJ_PY313
    /* Attribute stores write to values that lie inside the object without a new version. */
    if (d->ma_values != NULL) {
        return 0;
    }
#endif
    return d->ma_version_tag;
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
}

#endif /* MAGJIT_GUARD_H */
