/* Guard programs: the operations that put an object into a slot, from the call or from another
 * object, and those that see that there is none. */
#include "guard_ops.h"

#include <structmember.h>

PyTypeObject *mj_deque_type;

/* ---- roots ---- */

static bool
op_arg(guard_run *run, guard_instr *in)
{
    return in->n < run->call->nargs && mj_put(run, in, run->call->args[in->n]);
}

static Py_ssize_t
find_keyword(const guard_call *call, PyObject *name)
{
    Py_ssize_t n = call->kwnames != NULL ? PyTuple_GET_SIZE(call->kwnames) : 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PyTuple_GET_ITEM(call->kwnames, i) == name) {
            return i;
        }
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (mj_value_eq(name, PyTuple_GET_ITEM(call->kwnames, i)) == V_YES) {
            return i;
        }
    }
    return -1;
}

static bool
op_kwarg(guard_run *run, guard_instr *in)
{
    Py_ssize_t i = find_keyword(run->call, in->obj);
    return i >= 0 && mj_put(run, in, run->call->args[run->call->nargs + i]);
}

static bool
op_argc(guard_run *run, guard_instr *in)
{
    const guard_call *call = run->call;
    Py_ssize_t n = PyTuple_GET_SIZE(in->obj);
    if (call->nargs != in->n ||
        n != (call->kwnames != NULL ? PyTuple_GET_SIZE(call->kwnames) : 0)) {
        return false;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (find_keyword(call, PyTuple_GET_ITEM(in->obj, i)) < 0) {
            return false;
        }
    }
    return true;
}

static bool
op_kwarg_order(guard_run *run, guard_instr *in)
{
    const guard_call *call = run->call;
    Py_ssize_t n = PyTuple_GET_SIZE(in->obj);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *name = PyTuple_GET_ITEM(in->obj, i);
        if (find_keyword(call, name) != find_keyword(call, PyTuple_GET_ITEM(in->obj, 0)) + i) {
            return false;
        }
    }
    return true;
}

static bool
op_const(guard_run *run, guard_instr *in)
{
    return mj_put(run, in, in->obj);
}

static PyObject *
referent(PyObject *ref)
{
    PyObject *obj = ((PyWeakReference *)ref)->wr_object;
    return obj != Py_None && Py_REFCNT(obj) > 0 ? obj : NULL;
}

static bool
op_weak(guard_run *run, guard_instr *in)
{
    return mj_put(run, in, referent(in->obj));
}

/* ---- fetches ---- */

/* A collection could run finalisers, which are user code. */
static PyObject *
make_instance_dict(PyObject *obj)
{
    int gc = PyGC_Disable();
    PyObject **pointer = _PyObject_GetDictPtr(obj), *dict = NULL;
    if (pointer != NULL && *pointer == NULL) {
        /* Object without attributes so far: make the empty dict that the user would see. */
        PyObject *made = PyObject_GenericGetDict(obj, NULL);
        Py_XDECREF(made); /* the object holds it */
    }
    if (pointer != NULL) {
        dict = *pointer;
    }
    PyErr_Clear();
    if (gc) {
        PyGC_Enable();
    }
    return dict;
}

PyObject **
mj_instance_dict_address(PyObject *obj)
{
    PyTypeObject *type = Py_TYPE(obj);
    if (type->tp_flags & Py_TPFLAGS_MANAGED_DICT) {
        return (PyObject **)obj - 3;
    }
    return type->tp_dictoffset > 0 ? (PyObject **)((char *)obj + type->tp_dictoffset) : NULL;
}

PyObject *
mj_instance_dict(PyObject *obj)
{
    PyObject **address = mj_instance_dict_address(obj);
    /* The dict, or NULL as long as there is none, or (3.12) tagged values of attributes that have
     * no dict yet. */
    uintptr_t word = address != NULL ? (uintptr_t)*address : 0;
    if (word != 0 && !(word & 1)) {
        return (PyObject *)word;
    }
    return PyType_Check(obj) ? NULL : make_instance_dict(obj);
}

static bool
op_module_dict(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    return PyModule_Check(src) && mj_put(run, in, PyModule_GetDict(src));
}

static bool
op_getitem(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src], *value = NULL;
    return PyDict_Check(src) && mj_dict_get(src, in->obj, in->u.hash, &value) == V_YES &&
           mj_put(run, in, value);
}

static bool
op_absent(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src], *value;
    return PyDict_Check(src) && mj_dict_get(src, in->obj, in->u.hash, &value) == V_NO;
}

static bool
op_index(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    if (PyTuple_Check(src)) {
        return in->n < PyTuple_GET_SIZE(src) && mj_put(run, in, PyTuple_GET_ITEM(src, in->n));
    }
    if (PyList_Check(src)) {
        return in->n < PyList_GET_SIZE(src) && mj_put(run, in, PyList_GET_ITEM(src, in->n));
    }
    if (PyObject_TypeCheck(src, mj_deque_type) && in->n < Py_SIZE(src)) {
        PyObject *item = mj_deque_type->tp_as_sequence->sq_item(src, in->n);
        if (item == NULL) {
            PyErr_Clear();
            return false;
        }
        Py_DECREF(item); /* the deque holds it */
        return mj_put(run, in, item);
    }
    return false;
}

static bool
op_odict_key(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    return PyDict_Check(src) && mj_put(run, in, mj_dict_key_at(src, in->n));
}

static bool
op_cell(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    return PyCell_Check(src) && mj_put(run, in, PyCell_GET(src));
}

static bool
op_cell_empty(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    return PyCell_Check(src) && PyCell_GET(src) == NULL;
}

static bool
op_closure(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    PyObject *closure = PyFunction_Check(src) ? PyFunction_GET_CLOSURE(src) : NULL;
    return closure != NULL && in->n < PyTuple_GET_SIZE(closure) &&
           mj_put(run, in, PyTuple_GET_ITEM(closure, in->n));
}

static bool
op_func_globals(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    return PyFunction_Check(src) && mj_put(run, in, PyFunction_GET_GLOBALS(src));
}

static bool
op_func_defaults(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    PyObject *value = PyFunction_Check(src) ? PyFunction_GET_DEFAULTS(src) : NULL;
    return PyFunction_Check(src) && mj_put(run, in, value != NULL ? value : Py_None);
}

static bool
op_func_kwdefaults(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    PyObject *value = PyFunction_Check(src) ? PyFunction_GET_KW_DEFAULTS(src) : NULL;
    return PyFunction_Check(src) && mj_put(run, in, value != NULL ? value : Py_None);
}

static bool
op_method_func(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    return PyMethod_Check(src) && mj_put(run, in, PyMethod_GET_FUNCTION(src));
}

static bool
op_method_self(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    if (PyMethod_Check(src)) {
        return mj_put(run, in, PyMethod_GET_SELF(src));
    }
    return PyCFunction_Check(src) && mj_put(run, in, PyCFunction_GET_SELF(src));
}

static bool
op_type(guard_run *run, guard_instr *in)
{
    return mj_put(run, in, (PyObject *)Py_TYPE(run->slots[in->src]));
}

static PyObject **
member_address(PyObject *obj, PyObject *descr)
{
    PyMemberDescrObject *member = (PyMemberDescrObject *)descr;
    if (!PyObject_TypeCheck(obj, member->d_common.d_type)) {
        return NULL;
    }
    return (PyObject **)((char *)obj + member->d_member->offset);
}

static bool
op_slot(guard_run *run, guard_instr *in)
{
    PyObject **address = member_address(run->slots[in->src], in->obj);
    return address != NULL && mj_put(run, in, *address);
}

static bool
op_slot_empty(guard_run *run, guard_instr *in)
{
    PyObject **address = member_address(run->slots[in->src], in->obj);
    return address != NULL && *address == NULL;
}

static bool
op_tp_attr(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    return PyType_Check(src) && mj_put(run, in, _PyType_Lookup((PyTypeObject *)src, in->obj));
}

static bool
op_getattr_c(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src], *value;
    PyDescrObject *descr = (PyDescrObject *)in->obj;
    if (!PyObject_TypeCheck(src, descr->d_type)) {
        return false;
    }
    int gc = PyGC_Disable();
    if (Py_IS_TYPE(in->obj, &PyGetSetDescr_Type)) {
        PyGetSetDef *def = ((PyGetSetDescrObject *)descr)->d_getset;
        value = def->get != NULL ? def->get(src, def->closure) : NULL;
    }
    else {
        value = PyMember_GetOne((char *)src, ((PyMemberDescrObject *)descr)->d_member);
    }
    PyErr_Clear();
    if (gc) {
        PyGC_Enable();
    }
    if (value != NULL) {
        run->temps[run->n_temps++] = value;
    }
    return mj_put(run, in, value);
}

static bool
op_weakref_call(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    return PyWeakref_CheckRef(src) && mj_put(run, in, referent(src));
}

/* The value of a context variable in the current context, borrowed: the context holds it. */
static PyObject *
context_value(PyObject *var)
{
    PyObject *value = NULL;
    if (PyContextVar_Get(var, mj_null, &value) < 0) {
        PyErr_Clear();
        return NULL;
    }
    Py_XDECREF(value);
    return value == mj_null ? NULL : value;
}

static bool
op_context_value(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    return PyContextVar_CheckExact(src) && mj_put(run, in, context_value(src));
}

static bool
op_context_unset(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    return PyContextVar_CheckExact(src) && context_value(src) == NULL;
}

const op_function mj_fetch_functions[G_COUNT] = {
    [G_ARG] = op_arg,
    [G_KWARG] = op_kwarg,
    [G_ARGC] = op_argc,
    [G_KWARG_ORDER] = op_kwarg_order,
    [G_CONST] = op_const,
    [G_GLOBALS] = op_const,
    [G_WEAK] = op_weak,
    [G_MODULE_DICT] = op_module_dict,
    [G_GETITEM] = op_getitem,
    [G_ABSENT] = op_absent,
    [G_INDEX] = op_index,
    [G_ODICT_KEY] = op_odict_key,
    [G_CELL] = op_cell,
    [G_CELL_EMPTY] = op_cell_empty,
    [G_CLOSURE] = op_closure,
    [G_FUNC_GLOBALS] = op_func_globals,
    [G_FUNC_DEFAULTS] = op_func_defaults,
    [G_FUNC_KWDEFAULTS] = op_func_kwdefaults,
    [G_METHOD_FUNC] = op_method_func,
    [G_METHOD_SELF] = op_method_self,
    [G_TYPE] = op_type,
    [G_SLOT] = op_slot,
    [G_SLOT_EMPTY] = op_slot_empty,
    [G_TP_ATTR] = op_tp_attr,
    [G_GETATTR_C] = op_getattr_c,
    [G_WEAKREF_CALL] = op_weakref_call,
    [G_CONTEXT_VALUE] = op_context_value,
    [G_CONTEXT_UNSET] = op_context_unset,
};

int
mj_guard_fetch_init(void)
{
    PyObject *module = PyImport_ImportModule("collections");
    PyObject *deque = module != NULL ? PyObject_GetAttrString(module, "deque") : NULL;
    Py_XDECREF(module);
    if (deque == NULL) {
        return -1;
    }
    mj_deque_type = (PyTypeObject *)deque;
    return 0;
}
