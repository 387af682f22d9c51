/* Guard programs: the operations that compare what is in slots. */
#include "guard_ops.h"

static bool
op_is_not(guard_run *run, guard_instr *in)
{
    return run->slots[in->src] != in->obj;
}

static bool
op_eq(guard_run *run, guard_instr *in)
{
    return mj_value_eq(in->obj, run->slots[in->src]) == V_YES;
}

static bool
op_len(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    if (PyDict_Check(src)) {
        return PyDict_GET_SIZE(src) == in->n;
    }
    if (PyList_Check(src) || PyTuple_Check(src) || PyObject_TypeCheck(src, mj_deque_type)) {
        return Py_SIZE(src) == in->n;
    }
    return PyAnySet_Check(src) && PySet_GET_SIZE(src) == in->n;
}

static bool
op_keys(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    return PyDict_Check(src) && mj_dict_keys_are(src, in->obj);
}

static bool
op_set_eq(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    return PyAnySet_Check(src) && mj_set_is(src, in->obj);
}

static bool
op_same(guard_run *run, guard_instr *in)
{
    return run->slots[in->src] == run->slots[in->n];
}

static bool
op_distinct(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    for (Py_ssize_t i = 0; i < in->u.slots->n; i++) {
        if (run->slots[in->u.slots->slot[i]] == src) {
            return false;
        }
    }
    return true;
}

static int
compare_addresses(const void *a, const void *b)
{
    uintptr_t x = *(const uintptr_t *)a, y = *(const uintptr_t *)b;
    return x < y ? -1 : x > y;
}

/* No two of the objects are one. */
static bool
op_differ(guard_run *run, guard_instr *in)
{
    Py_ssize_t n = in->u.slots->n;
    uintptr_t small[64], *found = small;
    if (n == 2) {
        return run->slots[in->u.slots->slot[0]] != run->slots[in->u.slots->slot[1]];
    }
    if (n > 64 && (found = PyMem_Malloc((size_t)n * sizeof(*found))) == NULL) {
        return false;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        found[i] = (uintptr_t)run->slots[in->u.slots->slot[i]];
    }
    qsort(found, (size_t)n, sizeof(*found), compare_addresses);
    bool ok = true;
    for (Py_ssize_t i = 1; ok && i < n; i++) {
        ok = found[i - 1] != found[i];
    }
    if (found != small) {
        PyMem_Free(found);
    }
    return ok;
}

static bool
op_tp_names(guard_run *run, guard_instr *in)
{
    PyObject *type = in->flags & GF_TYPE_IN_SLOT ? run->slots[in->src] : in->obj;
    return PyType_Check(type) && mj_type_names_check(in->u.names, (PyTypeObject *)type);
}

static bool
op_func_code(guard_run *run, guard_instr *in)
{
    PyObject *src = run->slots[in->src];
    return PyFunction_Check(src) && PyFunction_GET_CODE(src) == in->obj;
}

static int
compare_ranges(const void *a, const void *b)
{
    const uintptr_t *x = a, *y = b;
    return x[0] < y[0] ? -1 : x[0] > y[0];
}

static bool
op_no_overlap(guard_run *run, guard_instr *in)
{
    Py_ssize_t n = in->u.slots->n, used = 0;
    uintptr_t small[64][2], (*range)[2] = small;
    if (n > 64 && (range = PyMem_Malloc((size_t)n * sizeof(*range))) == NULL) {
        return false;
    }
    bool ok = true;
    for (Py_ssize_t i = 0; ok && i < n; i++) {
        ok = mj_tensor_range(run->slots[in->u.slots->slot[i]], &range[used][0], &range[used][1]);
        used += ok && range[used][0] < range[used][1]; /* an empty tensor overlaps nothing */
    }
    if (ok) {
        qsort(range, (size_t)used, sizeof(*range), compare_ranges);
    }
    for (Py_ssize_t i = 1; ok && i < used; i++) {
        ok = range[i - 1][1] <= range[i][0];
    }
    if (range != small) {
        PyMem_Free(range);
    }
    return ok;
}

static bool
op_overlap(guard_run *run, guard_instr *in)
{
    int64_t distance, expected = 0;
    int relation = mj_tensor_relation(run->slots[in->src], run->slots[in->n], &distance);
    if (in->obj == Py_None || relation != 1) {
        return in->obj == Py_None && relation == 0;
    }
    expected = PyLong_AsLongLong(in->obj);
    if (expected == -1) {
        PyErr_Clear();
    }
    return distance == expected;
}

static bool
op_sizes(guard_run *run, guard_instr *in)
{
    return mj_sizes_hold(run, in);
}

static bool
op_global_state(guard_run *run, guard_instr *in)
{
    return mj_state_check(in->u.state);
}

static bool
op_pyeq(guard_run *run, guard_instr *in)
{
    int gc = PyGC_Disable();
    PyObject *value = PyObject_CallOneArg(in->u.obj2, run->slots[in->src]);
    bool ok = value != NULL && mj_value_eq(in->obj, value) == V_YES;
    PyErr_Clear();
    Py_XDECREF(value);
    if (gc) {
        PyGC_Enable();
    }
    return ok;
}

/* From now on Python code may run, and other threads with it. */
static void
pin_slots(guard_run *run)
{
    for (Py_ssize_t i = 0; !run->pinned && i < run->program->n_slots; i++) {
        if (run->program->written[i]) {
            run->temps[run->n_temps++] = Py_NewRef(run->slots[i]);
        }
    }
    run->pinned = true;
}

/* A backend's own condition on some inputs: the only check that may run Python code.  Nothing but
 * further predicates comes after it. */
static bool
op_predicate(guard_run *run, guard_instr *in)
{
    pin_slots(run);
    Py_ssize_t n = in->u.slots->n;
    PyObject *args = PyTuple_New(n);
    if (args == NULL) {
        PyErr_Clear();
        return false;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyTuple_SET_ITEM(args, i, Py_NewRef(run->slots[in->u.slots->slot[i]]));
    }
    PyObject *value = PyObject_Call(in->obj, args, NULL);
    bool ok = value != NULL && PyObject_IsTrue(value) == 1;
    PyErr_Clear();
    Py_XDECREF(value);
    Py_DECREF(args);
    return ok;
}

const op_function mj_check_functions[G_COUNT] = {
    [G_IS_NOT] = op_is_not,
    [G_EQ] = op_eq,
    [G_LEN] = op_len,
    [G_KEYS] = op_keys,
    [G_SET_EQ] = op_set_eq,
    [G_SAME] = op_same,
    [G_DISTINCT] = op_distinct,
    [G_DIFFER] = op_differ,
    [G_TP_NAMES] = op_tp_names,
    [G_FUNC_CODE] = op_func_code,
    [G_NO_OVERLAP] = op_no_overlap,
    [G_OVERLAP] = op_overlap,
    [G_SIZES] = op_sizes,
    [G_GLOBAL_STATE] = op_global_state,
    [G_PYEQ] = op_pyeq,
    [G_PREDICATE] = op_predicate,
};
