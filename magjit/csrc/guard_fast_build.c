/* The fast path of a guard program: building it from a program that has just accepted a call. */
#define Py_BUILD_CORE 1 /* dict versions: deprecated for others, but kept by 3.12 and 3.13 */
#include "guard_fast.h"
#undef Py_BUILD_CORE

#include <structmember.h>

typedef struct {
    guard_program *program;
    fast_path *f;
    PyObject **slots;
    /* By slot: the pointer is fixed; so is the type; it is known to be a dict; something is fetched
     * from it. */
    bool *stable, *typed, *is_dict, *derived;
    bool failed; /* out of memory */
} builder;

static bool
grow(builder *b, void **item, Py_ssize_t *cap, Py_ssize_t n, size_t size)
{
    if (n < *cap) {
        return true;
    }
    Py_ssize_t wanted = *cap * 2 + 16;
    void *moved = PyMem_Realloc(*item, (size_t)wanted * size);
    if (moved == NULL) {
        b->failed = true;
        return false;
    }
    *item = moved;
    *cap = wanted;
    return true;
}

#define PUSH(b, list, ...)                                                                     \
    do {                                                                                       \
        if (grow((b), (void **)&(list).item, &(list).cap, (list).n, sizeof((list).item[0]))) { \
            (list).item[(list).n++] = __VA_ARGS__;                                             \
        }                                                                                      \
    } while (0)

static inline int32_t
index_of(const builder *b, const guard_instr *in)
{
    return (int32_t)(in - b->program->code);
}

static void
add_word(builder *b, const guard_instr *in, const void *address, uint64_t expected)
{
    word w = {address, expected};
    PUSH(b, b->f->words, w);
    PUSH(b, b->f->origins, index_of(b, in));
}

/* The word at this address must stay what it is. */
static void
keep_word(builder *b, const guard_instr *in, const void *address)
{
    add_word(b, in, address, *(const raw64 *)address);
}

static PyObject *
keep_type(builder *b, const guard_instr *in)
{
    PyObject *src = b->slots[in->src];
    if (!b->typed[in->src]) {
        b->typed[in->src] = true;
        keep_word(b, in, &src->ob_type);
    }
    return src;
}

static void
add_rest(builder *b, guard_instr *in)
{
    rest_instr r = {index_of(b, in), 0};
    in->flags |= GF_IN_REST;
    PUSH(b, b->f->rest, r);
}

static bool
keep_type_version(builder *b, const guard_instr *in, PyObject *type)
{
    PyTypeObject *t = (PyTypeObject *)type;
    if (mj_type_version(t) == 0) {
        return false;
    }
#if !MJ_PY313
    keep_word(b, in, &t->tp_flags); /* whether the tag is valid */
#endif
    keep_word(b, in, &t->tp_version_tag);
    return true;
}

static bool
keep_item(builder *b, const guard_instr *in)
{
    PyObject *src = b->slots[in->src];
    if (PyTuple_Check(src)) {
        keep_type(b, in);
        keep_word(b, in, &((PyVarObject *)src)->ob_size);
        keep_word(b, in, &PyTuple_GET_ITEM(src, in->n));
        return true;
    }
    if (PyList_Check(src)) {
        keep_type(b, in);
        keep_word(b, in, &((PyVarObject *)src)->ob_size);
        keep_word(b, in, &((PyListObject *)src)->ob_item);
        keep_word(b, in, &PyList_GET_ITEM(src, in->n));
        return true;
    }
    return false;
}

static bool
keep_length(builder *b, const guard_instr *in)
{
    PyObject *src = b->slots[in->src];
    if (PyTuple_Check(src) || PyList_Check(src)) {
        keep_type(b, in);
        keep_word(b, in, &((PyVarObject *)src)->ob_size);
        return true;
    }
    if (PyDict_Check(src) || PyAnySet_Check(src)) {
        keep_type(b, in);
        keep_word(b, in,
                  PyDict_Check(src) ? &((PyDictObject *)src)->ma_used
                                    : &((PySetObject *)src)->used);
        return true;
    }
    return false;
}

static bool
keep_closure(builder *b, const guard_instr *in)
{
    PyObject *src = keep_type(b, in);
    PyObject *closure = PyFunction_GET_CLOSURE(src);
    keep_word(b, in, &((PyFunctionObject *)src)->func_closure);
    keep_word(b, in, &closure->ob_type);
    keep_word(b, in, &((PyVarObject *)closure)->ob_size);
    keep_word(b, in, &PyTuple_GET_ITEM(closure, in->n));
    return true;
}

/* A pointer in a function, method, cell or weak reference: the address of the field, or NULL. */
static const void *
field_address(const guard_instr *in, PyObject *src)
{
    PyFunctionObject *function = (PyFunctionObject *)src;
    switch (in->op) {
    case G_CELL:
    case G_CELL_EMPTY:
        return &((PyCellObject *)src)->ob_ref;
    case G_FUNC_GLOBALS:
        return &function->func_globals;
    case G_FUNC_DEFAULTS:
        return &function->func_defaults;
    case G_FUNC_KWDEFAULTS:
        return &function->func_kwdefaults;
    case G_FUNC_CODE:
        return &function->func_code;
    case G_METHOD_FUNC:
        return &((PyMethodObject *)src)->im_func;
    case G_METHOD_SELF:
        return PyMethod_Check(src) ? (const void *)&((PyMethodObject *)src)->im_self
                                   : (const void *)&((PyCFunctionObject *)src)->m_self;
    case G_WEAKREF_CALL:
        return &((PyWeakReference *)src)->wr_object;
    case G_SLOT:
    case G_SLOT_EMPTY:
        return (char *)src + ((PyMemberDescrObject *)in->obj)->d_member->offset;
    case G_DICT:
    case G_MODULE_DICT:
        return mj_instance_dict_address(src);
    default:
        return NULL;
    }
}

static bool
keep_field(builder *b, const guard_instr *in)
{
    PyObject *src = b->slots[in->src];
    const void *address = field_address(in, src);
    if (address == NULL) {
        return false;
    }
    keep_type(b, in);
    keep_word(b, in, address);
    return true;
}

static bool
keep_class_attributes(builder *b, guard_instr *in)
{
    if (in->op == G_TP_NAMES && !(in->flags & GF_TYPE_IN_SLOT)) {
        return keep_type_version(b, in, in->obj);
    }
    if (in->src >= 0 && !b->stable[in->src]) {
        return false;
    }
    keep_type(b, in);
    return keep_type_version(b, in, b->slots[in->src]);
}

static bool
all_stable(const builder *b, const guard_instr *in)
{
    if (in->op == G_SAME && !b->stable[in->n]) {
        return false;
    }
    bool many = in->op == G_DISTINCT || in->op == G_DIFFER;
    for (Py_ssize_t i = 0; many && i < in->u.slots->n; i++) {
        if (!b->stable[in->u.slots->slot[i]]) {
            return false;
        }
    }
    return true;
}

/* Arguments of which something is fetched are expected to be the same objects again: `self`, above
 * all. */
static bool
add_argument(builder *b, guard_instr *in)
{
    if (!b->derived[in->dst]) {
        return false;
    }
    root_check r = {b->slots[in->dst], in->n, index_of(b, in)};
    PUSH(b, b->f->roots, r);
    return true;
}

/* True if words (or nothing) stand for the instruction, so that what it fetches is stable. */
static bool
add_stable(builder *b, guard_instr *in)
{
    switch (in->op) {
    case G_ARG:
        return add_argument(b, in);
    case G_CONST:
    case G_GLOBALS:
        return true;
    case G_WEAK:
        keep_word(b, in, &((PyWeakReference *)in->obj)->wr_object);
        return true;
    case G_TP_NAMES:
    case G_TP_ATTR:
        return keep_class_attributes(b, in);
    case G_DIFFER:
        return all_stable(b, in);
    default:
        break;
    }
    if (in->src < 0 || !b->stable[in->src] || !all_stable(b, in)) {
        return false;
    }
    switch (in->op) {
    case G_EQ: /* the same object, which the program holds, is equal; another one may come to differ
                */
        return b->slots[in->src] == in->obj;
    case G_IS: /* with the slot's pointer fixed, these have been decided */
    case G_IS_NOT:
    case G_SAME:
    case G_DISTINCT:
        return true;
    case G_TYPE:
    case G_TYPE_IS:
        keep_type(b, in);
        return true;
    case G_INDEX:
        return keep_item(b, in);
    case G_LEN:
        return keep_length(b, in);
    case G_CLOSURE:
        return keep_closure(b, in);
    case G_TENSOR: {
        tensor_check t = {in->u.meta, b->slots[in->src], index_of(b, in)};
        PUSH(b, b->f->tensors, t);
        return true;
    }
    default:
        return keep_field(b, in);
    }
}

#if MJ_PY313
static bool
is_entry(const guard_instr *in)
{
    return in->op == G_GETITEM || in->op == G_ABSENT || in->op == G_LEN;
}

/* Attributes that the object keeps in itself have no version: each is a word. */
static bool
add_inline_block(builder *b, guard_instr *block)
{
    PyObject *dict = b->slots[block->src];
    inline_attribute at;
    bool first = true;
    for (guard_instr *in = block + 1; in <= block + block->n; in++) {
        bool own = in->src == block->src;
        if (own &&
            (!is_entry(in) || (in->op != G_LEN && !mj_inline_attribute(dict, in->obj, &at)))) {
            return false;
        }
    }
    for (guard_instr *in = block + 1; in <= block + block->n; in++) {
        bool entry = in->src == block->src && in->op != G_LEN;
        if (in->flags & GF_VOLATILE || (!entry && !add_stable(b, in))) {
            add_rest(b, in);
            continue;
        }
        if (entry && mj_inline_attribute(dict, in->obj, &at)) {
            if (first) {
                keep_word(b, in, at.keys);
                keep_word(b, in, at.values);
                first = false;
            }
            keep_word(b, in, at.value != NULL ? at.value : at.names);
        }
        if (in->dst >= 0) {
            b->stable[in->dst] = true;
        }
    }
    return true;
}
#else
static bool
add_inline_block(builder *b, guard_instr *block)
{
    return false;
}
#endif

/* Entries of a dict whose version is a word.  A dict found in it is one as long as the version
 * holds; found by its pointer alone, after a new version, it must be looked at. */
static void
add_block(builder *b, guard_instr *block)
{
    PyObject *dict = b->slots[block->src];
    if (!b->is_dict[block->src]) {
        keep_type(b, block);
    }
    const void *order = block->flags & GF_ORDERED ? mj_odict_state(dict) : NULL;
    bool odict = block->flags & GF_ORDERED && PyODict_Check(dict);
    if (mj_dict_version(dict) == 0 && add_inline_block(b, block)) {
        return;
    }
    block->flags |= odict ? GF_ODICT : 0;
    if (mj_dict_version(dict) == 0 || (odict && order == NULL)) {
        add_word(b, block, &mj_never, 1);
    }
    else {
        keep_word(b, block, (char *)dict + offsetof(PyDictObject, ma_version_tag));
        if (odict) {
            keep_word(b, block, order);
        }
    }
    for (guard_instr *in = block + 1; in <= block + block->n; in++) {
        bool depends = in->src != block->src && !b->stable[in->src];
        if (depends || in->flags & GF_VOLATILE) {
            add_rest(b, in);
        }
        else if (in->dst >= 0) {
            b->stable[in->dst] = true;
            b->is_dict[in->dst] = PyDict_Check(b->slots[in->dst]);
            in->flags |= b->is_dict[in->dst] ? GF_DICT : 0;
        }
    }
}

static void
build(builder *b)
{
    guard_program *p = b->program;
    for (guard_instr *in = p->code, *end = p->code + p->n_instrs; in < end; in++) {
        in->flags &= (uint8_t)~(GF_IN_REST | GF_DICT | GF_ODICT);
        if (in->src >= 0 && in->op != G_TENSOR && in->op != G_EQ && in->op != G_PYEQ &&
            in->op != G_SET_EQ) {
            b->derived[in->src] = b->derived[in->src] || in->dst >= 0 || in->op == G_DICT_BLOCK;
        }
    }
    for (Py_ssize_t pc = 0; pc < p->n_instrs; pc++) {
        guard_instr *in = &p->code[pc];
        if (in->op == G_ARGC) {
            PUSH(b, b->f->shape, (int32_t)pc);
        }
        else if (in->op == G_DICT_BLOCK && b->stable[in->src] && !(in->flags & GF_VOLATILE)) {
            add_block(b, in);
            pc += in->n;
        }
        else if (in->flags & GF_VOLATILE || !add_stable(b, in)) {
            add_rest(b, in);
            pc += in->op == G_DICT_BLOCK ? in->n : 0;
        }
        else if (in->dst >= 0) {
            b->stable[in->dst] = true;
            b->is_dict[in->dst] =
                in->op == G_DICT || in->op == G_MODULE_DICT || in->op == G_GLOBALS;
        }
    }
}

/* The second time is enough: a third object will come. */
static void
note_suspect(guard_program *p)
{
    if (p->fast != NULL && p->fast->suspect >= 0) {
        guard_instr *in = &p->code[p->fast->suspect];
        in->flags |= in->flags & GF_CHANGED ? GF_VOLATILE : GF_CHANGED;
    }
}

/* After a call was accepted, with its slots. */
void
mj_fast_build(guard_program *p, const guard_run *run)
{
    size_t n = (size_t)p->n_slots + 1;
    note_suspect(p);
    mj_fast_free(p->fast);
    p->fast = NULL;
    builder b = {.program = p, .slots = run->slots};
    b.f = PyMem_Calloc(1, sizeof(fast_path));
    b.stable = PyMem_Calloc(4 * n, sizeof(bool));
    if (b.f != NULL) {
        b.f->slots = PyMem_Malloc(n * sizeof(PyObject *));
    }
    if (b.stable == NULL || b.f == NULL || b.f->slots == NULL) {
        b.failed = true;
    }
    else {
        b.typed = b.stable + n;
        b.is_dict = b.typed + n;
        b.derived = b.is_dict + n;
        memcpy(b.f->slots, run->slots, (size_t)p->n_slots * sizeof(PyObject *));
        build(&b);
    }
    PyMem_Free(b.stable);
    if (b.failed) {
        mj_fast_free(b.f);
        return;
    }
    p->fast = b.f;
}
