/* Guard programs: from tuples to instructions, with every static fact verified once so that the
 * executor need not. */
#include "guard.h"

#include <structmember.h>

/* Operands, in order: d slot written, s slot read, 2 second slot read, i index or count, o any
 * object, n str, k dict key, T type, K tuple, D dict, C code object, w weak reference, M member of
 * __slots__, G C getset or member, L tuple of slots, z condition on the sizes of those, m tensor
 * metadata, N class attributes, S type or slot that holds one, f set of primitive values, g global
 * state (optional), c C function. */
typedef struct {
    const char *name;
    const char *operands;
} op_spec;

static const op_spec specs[G_COUNT] = {
    [G_ARG] = {"arg", "di"},
    [G_KWARG] = {"kwarg", "dn"},
    [G_ARGC] = {"argc", "iK"},
    [G_KWARG_ORDER] = {"kwarg_order", "K"},
    [G_CONST] = {"const", "do"},
    [G_GLOBALS] = {"globals", "dD"},
    [G_WEAK] = {"weak", "dw"},
    [G_DICT] = {"dict", "ds"},
    [G_MODULE_DICT] = {"module_dict", "ds"},
    [G_GETITEM] = {"getitem", "dsk"},
    [G_ABSENT] = {"absent", "sk"},
    [G_INDEX] = {"index", "dsi"},
    [G_ODICT_KEY] = {"odict_key", "dsi"},
    [G_CELL] = {"cell", "ds"},
    [G_CELL_EMPTY] = {"cell_empty", "s"},
    [G_CLOSURE] = {"closure", "dsi"},
    [G_FUNC_GLOBALS] = {"func_globals", "ds"},
    [G_FUNC_DEFAULTS] = {"func_defaults", "ds"},
    [G_FUNC_KWDEFAULTS] = {"func_kwdefaults", "ds"},
    [G_METHOD_FUNC] = {"method_func", "ds"},
    [G_METHOD_SELF] = {"method_self", "ds"},
    [G_TYPE] = {"type", "ds"},
    [G_SLOT] = {"slot", "dsM"},
    [G_SLOT_EMPTY] = {"slot_empty", "sM"},
    [G_TP_ATTR] = {"tp_attr", "dsn"},
    [G_GETATTR_C] = {"getattr_c", "dsG"},
    [G_WEAKREF_CALL] = {"weakref_call", "ds"},
    [G_CONTEXT_VALUE] = {"context_value", "ds"},
    [G_CONTEXT_UNSET] = {"context_unset", "s"},
    [G_IS] = {"is", "so"},
    [G_IS_NOT] = {"is_not", "so"},
    [G_TYPE_IS] = {"type_is", "sT"},
    [G_EQ] = {"eq", "so"},
    [G_LEN] = {"len", "si"},
    [G_KEYS] = {"keys", "sK"},
    [G_SET_EQ] = {"set_eq", "sf"},
    [G_SAME] = {"same", "s2"},
    [G_DISTINCT] = {"distinct", "sL"},
    [G_DIFFER] = {"differ", "L"},
    [G_TP_NAMES] = {"tp_names", "SN"},
    [G_FUNC_CODE] = {"func_code", "sC"},
    [G_TENSOR] = {"tensor", "sm"},
    [G_NO_OVERLAP] = {"no_overlap", "L"},
    [G_OVERLAP] = {"overlap", "s2o"},
    [G_GLOBAL_STATE] = {"global_state", "g"},
    [G_SIZES] = {"sizes", "Lz"},
    [G_PYEQ] = {"pyeq", "soc"},
    [G_PREDICATE] = {"predicate", "Lo"},
    [G_DICT_BLOCK] = {"dict_block", "si"},
};

/* ---- errors ---- */

typedef struct {
    guard_program *program;
    PyObject *tuple;
    Py_ssize_t index;
    guard_instr *in;
    Py_ssize_t block; /* instruction of the open dict_block, or -1 */
    Py_ssize_t block_end;
} parser;

static int
bad(const parser *p, const char *what)
{
    if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_TypeError) ||
        PyErr_ExceptionMatches(PyExc_OverflowError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Format(PyExc_ValueError, "instruction %zd (%s): %s", p->index,
                     p->in != NULL ? specs[p->in->op].name : "?", what);
    }
    return -1;
}

static int
parse_slot(const parser *p, PyObject *item, bool written, int32_t *out)
{
    long slot = PyLong_CheckExact(item) ? PyLong_AsLong(item) : -1;
    if (slot < 0 || slot >= p->program->n_slots) {
        return bad(p, "slot out of range");
    }
    if (written) {
        if (p->program->written[slot]) {
            return bad(p, "slot written twice");
        }
    }
    else if (!p->program->written[slot]) {
        return bad(p, "slot read before it is written");
    }
    *out = (int32_t)slot;
    return 0;
}

static int
set_obj(guard_instr *in, PyObject *obj)
{
    Py_INCREF(obj);
    if (in->obj == NULL) {
        in->obj = obj;
    }
    else {
        in->u.obj2 = obj;
    }
    return 0;
}

/* ---- operands ---- */

static int
parse_slots(const parser *p, PyObject *item)
{
    PyObject *seq = PySequence_Fast(item, "expected a sequence of slots");
    if (seq == NULL) {
        return bad(p, "expected a sequence of slots");
    }
    Py_ssize_t n = PySequence_Fast_GET_SIZE(seq);
    slot_list *list = PyMem_Malloc(sizeof(slot_list) + (size_t)n * sizeof(int32_t));
    int status = -1;
    if (list == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    list->n = n;
    p->in->u.slots = list;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (parse_slot(p, PySequence_Fast_GET_ITEM(seq, i), false, &list->slot[i]) < 0) {
            goto done;
        }
    }
    status = 0;
done:
    Py_DECREF(seq);
    return status;
}

static int
parse_key(const parser *p, PyObject *item)
{
    Py_hash_t hash = PyObject_Hash(item);
    if (hash == -1) {
        return bad(p, "unhashable key");
    }
    p->in->u.hash = hash;
    return set_obj(p->in, item);
}

static int
parse_set(const parser *p, PyObject *item)
{
    if (!PyFrozenSet_CheckExact(item)) {
        return bad(p, "expected a frozenset");
    }
    PyObject *map = PyDict_New(), *it = PyObject_GetIter(item), *element;
    if (map == NULL || it == NULL) {
        Py_XDECREF(map);
        Py_XDECREF(it);
        return -1;
    }
    while ((element = PyIter_Next(it)) != NULL) {
        int status = PyDict_SetItem(map, element, element);
        Py_DECREF(element);
        if (status < 0) {
            break;
        }
    }
    Py_DECREF(it);
    p->in->obj = map;
    return PyErr_Occurred() ? -1 : 0;
}

static int
parse_member(const parser *p, PyObject *item)
{
    if (!Py_IS_TYPE(item, &PyMemberDescr_Type)) {
        return bad(p, "expected a member descriptor");
    }
    PyMemberDef *member = ((PyMemberDescrObject *)item)->d_member;
    if (member->type != T_OBJECT_EX && member->type != T_OBJECT) {
        return bad(p, "expected a member that holds an object");
    }
    return set_obj(p->in, item);
}

static int
parse_c_callable(const parser *p, PyObject *item)
{
    if (!PyCFunction_Check(item) && !Py_IS_TYPE(item, &PyMethodDescr_Type)) {
        return bad(p, "expected a C function");
    }
    return set_obj(p->in, item);
}

static int
parse_class_attributes(const parser *p, PyObject *item)
{
    p->in->u.names = mj_type_names_new(item);
    return p->in->u.names != NULL ? 0 : bad(p, "expected ((name, object or _C.NULL), ...)");
}

static int
parse_checked(const parser *p, PyObject *item, bool ok, const char *what)
{
    return ok ? set_obj(p->in, item) : bad(p, what);
}

static int
parse_count(const parser *p, PyObject *item)
{
    long n = PyLong_CheckExact(item) ? PyLong_AsLong(item) : -1;
    if (n < 0 || n > INT32_MAX) {
        return bad(p, "expected a small non-negative int");
    }
    p->in->n = (int32_t)n;
    return 0;
}

static int
parse_type_or_slot(const parser *p, PyObject *item)
{
    if (PyType_Check(item)) {
        return set_obj(p->in, item);
    }
    p->in->flags |= GF_TYPE_IN_SLOT;
    return parse_slot(p, item, false, &p->in->src);
}

static int
parse_sizes(const parser *p, PyObject *item)
{
    p->in->obj = mj_sizes_parse(item, p->in->u.slots->n);
    return p->in->obj != NULL ? 0 : bad(p, "expected a condition on sizes, see guard_sizes.c");
}

static int
parse_getset(const parser *p, PyObject *item)
{
    p->program->n_temps++;
    bool ok = Py_IS_TYPE(item, &PyGetSetDescr_Type) || Py_IS_TYPE(item, &PyMemberDescr_Type);
    return parse_checked(p, item, ok, "expected a getset or member descriptor");
}

static int
parse_operand(const parser *p, char kind, PyObject *item)
{
    guard_instr *in = p->in;
    switch (kind) {
    case 'd':
        return parse_slot(p, item, true, &in->dst);
    case 's':
        return parse_slot(p, item, false, &in->src);
    case '2':
        return parse_slot(p, item, false, &in->n);
    case 'S':
        return parse_type_or_slot(p, item);
    case 'i':
        return parse_count(p, item);
    case 'o':
        return set_obj(in, item);
    case 'n':
        return parse_checked(p, item, PyUnicode_CheckExact(item), "expected a str");
    case 'k':
        return parse_key(p, item);
    case 'T':
        return parse_checked(p, item, PyType_Check(item), "expected a type");
    case 'K':
        return parse_checked(p, item, PyTuple_CheckExact(item), "expected a tuple");
    case 'D':
        return parse_checked(p, item, PyDict_Check(item), "expected a dict");
    case 'C':
        return parse_checked(p, item, PyCode_Check(item), "expected a code object");
    case 'w':
        return parse_checked(p, item, PyWeakref_CheckRefExact(item), "expected a weakref.ref");
    case 'M':
        return parse_member(p, item);
    case 'G':
        return parse_getset(p, item);
    case 'L':
        return parse_slots(p, item);
    case 'z':
        return parse_sizes(p, item);
    case 'm':
        in->u.meta = mj_meta_parse(item);
        return in->u.meta != NULL ? 0
                                  : bad(p, "expected tensor metadata as _C.tensor_meta gives it");
    case 'N':
        return parse_class_attributes(p, item);
    case 'f':
        return parse_set(p, item);
    case 'g':
        in->u.state = mj_state_parse(item);
        return in->u.state != NULL ? 0 : bad(p, "expected a state as _C.global_state gives it");
    default:
        return parse_c_callable(p, item);
    }
}

/* ---- rules of single operations ---- */

/* The class of an instance of a Python class can be assigned, which no dict version shows. */
static bool
class_is_fixed(PyObject *type)
{
    unsigned long flags = ((PyTypeObject *)type)->tp_flags;
    return !(flags & Py_TPFLAGS_HEAPTYPE) || (flags & Py_TPFLAGS_IMMUTABLETYPE);
}

static int
verify_in_block(const parser *p)
{
    guard_instr *in = p->in, *block = &p->program->code[p->block];
    bool leaf = in->src >= 0 && in->src != block->src;
    for (Py_ssize_t i = p->block + 1; leaf && i < p->index; i++) {
        if (p->program->code[i].dst == in->src) {
            leaf = false;
        }
    }
    if (leaf) {
        return bad(p, "reads a slot from outside its dict_block");
    }
    switch (in->op) {
    case G_KEYS:
    case G_ODICT_KEY:
        if (in->op == G_ODICT_KEY || PyTuple_GET_SIZE(in->obj) > 1) {
            block->flags |= GF_ORDERED;
        }
        /* fall through */
    case G_GETITEM:
    case G_ABSENT:
    case G_LEN:
        return in->src == block->src ? 0 : bad(p, "reads another object than its dict_block's");
    case G_TYPE_IS:
        return class_is_fixed(in->obj)
                   ? 0
                   : bad(p, "class may change without a new version of the dict");
    case G_IS:
    case G_IS_NOT:
    case G_EQ:
        return 0;
    default:
        return bad(p, "not allowed in a dict_block");
    }
}

static int
verify_instr(parser *p)
{
    guard_instr *in = p->in;
    if (p->block >= 0 && verify_in_block(p) < 0) {
        return -1;
    }
    if (in->op == G_ARGC) {
        Py_ssize_t n = PyTuple_GET_SIZE(in->obj);
        for (Py_ssize_t i = 0; i < n; i++) {
            if (!PyUnicode_CheckExact(PyTuple_GET_ITEM(in->obj, i))) {
                return bad(p, "keyword names must be str");
            }
        }
    }
    if (in->op == G_PREDICATE && !p->program->runs_python) {
        p->program->runs_python = true;
        p->program->n_temps += p->program->n_slots;
    }
    else if (p->program->runs_python && in->op != G_PREDICATE) {
        return bad(p, "only predicates may follow a predicate");
    }
    if (in->op == G_OVERLAP && !(in->obj == Py_None || PyLong_CheckExact(in->obj))) {
        return bad(p, "relation must be None or a distance in bytes");
    }
    if (in->op == G_DICT_BLOCK) {
        in->u.version = 0;
        p->block = p->index;
        p->block_end = p->index + 1 + in->n;
        if (p->block_end > p->program->n_instrs) {
            return bad(p, "block reaches past the end of the program");
        }
    }
    if (in->dst >= 0) {
        p->program->written[in->dst] = true;
    }
    return 0;
}

/* ---- programs ---- */

static int
find_op(PyObject *name)
{
    for (int op = 0; PyUnicode_Check(name) && op < G_COUNT; op++) {
        if (PyUnicode_CompareWithASCIIString(name, specs[op].name) == 0) {
            return op;
        }
    }
    return -1;
}

static int
parse_instr(parser *p)
{
    p->in = NULL;
    if (!PyTuple_Check(p->tuple) || PyTuple_GET_SIZE(p->tuple) < 1) {
        return bad(p, "expected a tuple (op, operands...)");
    }
    int op = find_op(PyTuple_GET_ITEM(p->tuple, 0));
    if (op < 0) {
        return bad(p, "unknown operation");
    }
    guard_instr *in = p->in = &p->program->code[p->index];
    in->op = (uint8_t)op;
    in->dst = in->src = -1;
    const char *operands = specs[op].operands;
    Py_ssize_t n = PyTuple_GET_SIZE(p->tuple) - 1, wanted = (Py_ssize_t)strlen(operands);
    if (op == G_GLOBAL_STATE && n == 0) {
        in->u.state = mj_state_parse(NULL);
        return in->u.state != NULL ? verify_instr(p) : -1;
    }
    if (n != wanted) {
        return bad(p, "wrong number of operands");
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (parse_operand(p, operands[i], PyTuple_GET_ITEM(p->tuple, i + 1)) < 0) {
            return -1;
        }
    }
    return verify_instr(p);
}

int
mj_guard_parse(guard_program *program, PyObject *instrs)
{
    Py_ssize_t n = PyTuple_GET_SIZE(instrs);
    program->n_instrs = n;
    program->code = PyMem_Calloc((size_t)n + 1, sizeof(guard_instr));
    program->written = PyMem_Calloc((size_t)program->n_slots + 1, sizeof(bool));
    if (program->code == NULL || program->written == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    parser p = {.program = program, .block = -1};
    for (p.index = 0; p.index < n; p.index++) {
        if (p.block >= 0 && p.index >= p.block_end) {
            p.block = -1;
        }
        p.tuple = PyTuple_GET_ITEM(instrs, p.index);
        if (parse_instr(&p) < 0) {
            return -1;
        }
    }
    return 0;
}
