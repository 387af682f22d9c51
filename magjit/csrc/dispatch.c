/* Dispatcher: the path of every call of a compiled function.
 *
 *     dispatcher(args) = the first record, most recently hit first, whose program accepts args
 *                      | miss(args, kwargs)
 *
 * The records may change, and the dispatcher may be called again or dropped, while user code runs.
 */
#include "dispatch.h"

#include "reading.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD vectorcallfunc vectorcall;
    PyObject *miss;
    PyObject *failed; /* called when a record that serves a call fails, or NULL */
    PyObject *bound; /* first argument of every call, or NULL */
    PyObject *weakrefs;
    record **records; /* most recently hit first */
    Py_ssize_t n_records, capacity;
    unsigned long long misses;
    char enabled;
} dispatcher;

static PyTypeObject dispatcher_type;
static bool force_misses; /* every call of every dispatcher is a miss */
static unsigned long long calls; /* of dispatchers, those that are made by one not counted */
static _Thread_local Py_ssize_t depth;
static _Thread_local unsigned long long outermost; /* the number of that which is under way */

static PyObject *
set_force_misses(PyObject *module, PyObject *on)
{
    int truth = PyObject_IsTrue(on);
    if (truth < 0) {
        return NULL;
    }
    force_misses = truth;
    Py_RETURN_NONE;
}

static void
move_to_front(dispatcher *d, Py_ssize_t i)
{
    record *r = d->records[i];
    memmove(d->records + 1, d->records, (size_t)i * sizeof(record *));
    d->records[0] = r;
}

static int
call_arguments(const guard_call *call, PyObject **args, PyObject **kwargs)
{
    *args = PyTuple_New(call->nargs);
    *kwargs = PyDict_New();
    if (*args == NULL || *kwargs == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < call->nargs; i++) {
        PyTuple_SET_ITEM(*args, i, Py_NewRef(call->args[i]));
    }
    for (Py_ssize_t i = 0; call->kwnames != NULL && i < PyTuple_GET_SIZE(call->kwnames); i++) {
        if (PyDict_SetItem(*kwargs, PyTuple_GET_ITEM(call->kwnames, i),
                           call->args[call->nargs + i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
call_miss(dispatcher *d, const guard_call *call)
{
    if (d->miss == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this dispatcher was cleared");
        return NULL;
    }
    PyObject *args, *kwargs, *result = NULL;
    if (call_arguments(call, &args, &kwargs) == 0) {
        PyObject *miss = Py_NewRef(d->miss);
        result = PyObject_CallFunctionObjArgs(miss, args, kwargs, NULL);
        Py_DECREF(miss);
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return result;
}

/* An exception is set; failed(record, args, kwargs, error, in_graph) has the last word. */
static PyObject *
call_failed(dispatcher *d, record *r, const guard_call *call, bool in_graph)
{
    PyObject *type, *error, *traceback, *args, *kwargs, *result = NULL;
    PyObject *failed = Py_NewRef(d->failed);
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(error, traceback);
    }
    if (call_arguments(call, &args, &kwargs) == 0) {
        result = PyObject_CallFunctionObjArgs(failed, (PyObject *)r, args, kwargs, error,
                                              in_graph ? Py_True : Py_False, NULL);
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    Py_DECREF(failed);
    return result;
}

static PyObject *
dispatch(dispatcher *d, const guard_call *call)
{
    for (Py_ssize_t i = 0; d->enabled && !force_misses && i < d->n_records; i++) {
        record *r = d->records[i];
        guard_run run;
        /* The reference covers programs that call C functions, which might change the list of
         * records. */
        Py_INCREF(r);
        bool hit = r->program != NULL && mj_program_enter(r->program, call, &run);
        if (hit) {
            if (i > 0 && i < d->n_records && d->records[i] == r) {
                move_to_front(d, i);
            }
            bool in_graph;
            mj_effects += !r->pure;
            PyObject *result = mj_record_serve(r, &run, &in_graph);
            if (result == NULL && d->failed != NULL && d->failed != Py_None) {
                mj_effects++;
                result = call_failed(d, r, call, in_graph);
            }
            Py_DECREF(r);
            return result;
        }
        Py_DECREF(r);
    }
    d->misses++;
    mj_effects++;
    return call_miss(d, call);
}

static PyObject *
dispatch_bound_copy(dispatcher *d, guard_call *call, Py_ssize_t n)
{
    PyObject *small[64], **values = small;
    if (n + 1 > 64 && (values = PyMem_Malloc((size_t)(n + 1) * sizeof(PyObject *))) == NULL) {
        return PyErr_NoMemory();
    }
    values[0] = d->bound;
    memcpy(values + 1, call->args, (size_t)n * sizeof(PyObject *));
    call->args = values;
    call->nargs++;
    PyObject *result = dispatch(d, call);
    if (values != small) {
        PyMem_Free(values);
    }
    return result;
}

static PyObject *
dispatcher_vectorcall(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    dispatcher *d = (dispatcher *)self;
    guard_call call = {args, PyVectorcall_NARGS(nargsf), kwnames};
    Py_ssize_t n_keywords = kwnames != NULL ? PyTuple_GET_SIZE(kwnames) : 0;
    PyObject *result;
    Py_INCREF(self);
    if (depth++ == 0) {
        outermost = ++calls;
    }
    if (d->bound == NULL) {
        result = dispatch(d, &call);
    }
    else if (nargsf & PY_VECTORCALL_ARGUMENTS_OFFSET) {
        /* The caller lends the place before the first argument. */
        PyObject **place = (PyObject **)args - 1, *saved = *place;
        *place = d->bound;
        call.args = place;
        call.nargs++;
        result = dispatch(d, &call);
        *place = saved;
    }
    else {
        result = dispatch_bound_copy(d, &call, call.nargs + n_keywords);
    }
    depth--;
    Py_DECREF(self);
    return result;
}

static PyObject *
current_call(PyObject *module, PyObject *unused)
{
    return PyLong_FromUnsignedLongLong(depth > 0 ? outermost : 0);
}

/* ---- methods of dispatchers ---- */

static int
append_record(dispatcher *d, PyObject *item)
{
    if (!PyObject_TypeCheck(item, &mj_record_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Record, not %.100s", Py_TYPE(item)->tp_name);
        return -1;
    }
    if (d->n_records == d->capacity) {
        Py_ssize_t capacity = d->capacity * 2 + 4;
        record **records = PyMem_Realloc(d->records, (size_t)capacity * sizeof(record *));
        if (records == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        d->records = records;
        d->capacity = capacity;
    }
    d->records[d->n_records++] = (record *)Py_NewRef(item);
    return 0;
}

static PyObject *
dispatcher_add(PyObject *self, PyObject *item)
{
    dispatcher *d = (dispatcher *)self;
    if (append_record(d, item) < 0) {
        return NULL;
    }
    move_to_front(d, d->n_records - 1);
    Py_RETURN_NONE;
}

static PyObject *
dispatcher_remove(PyObject *self, PyObject *item)
{
    dispatcher *d = (dispatcher *)self;
    for (Py_ssize_t i = 0; i < d->n_records; i++) {
        if ((PyObject *)d->records[i] == item) {
            d->n_records--;
            memmove(d->records + i, d->records + i + 1,
                    (size_t)(d->n_records - i) * sizeof(record *));
            Py_DECREF(item);
            Py_RETURN_NONE;
        }
    }
    PyErr_SetString(PyExc_ValueError, "no such record");
    return NULL;
}

static void
drop_records(dispatcher *d)
{
    record **records = d->records;
    Py_ssize_t n = d->n_records;
    d->records = NULL;
    d->n_records = d->capacity = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_DECREF(records[i]);
    }
    PyMem_Free(records);
}

static PyObject *
dispatcher_drop(PyObject *self, PyObject *unused)
{
    drop_records((dispatcher *)self);
    Py_RETURN_NONE;
}

static PyObject *
dispatcher_get_records(PyObject *self, void *closure)
{
    dispatcher *d = (dispatcher *)self;
    PyObject *list = PyList_New(d->n_records);
    for (Py_ssize_t i = 0; list != NULL && i < PyList_GET_SIZE(list); i++) {
        PyList_SET_ITEM(list, i, Py_NewRef((PyObject *)d->records[i]));
    }
    return list;
}

static PyObject *
dispatcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"miss", "records", "bound", NULL};
    PyObject *miss, *records = NULL, *bound = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OO:Dispatcher", keywords, &miss, &records,
                                     &bound)) {
        return NULL;
    }
    if (!PyCallable_Check(miss)) {
        PyErr_SetString(PyExc_TypeError, "miss: expected a callable");
        return NULL;
    }
    PyObject *items =
        records != NULL ? PySequence_Fast(records, "records: expected a list") : PyTuple_New(0);
    dispatcher *d = items != NULL ? (dispatcher *)type->tp_alloc(type, 0) : NULL;
    if (d == NULL) {
        Py_XDECREF(items);
        return NULL;
    }
    d->vectorcall = dispatcher_vectorcall;
    d->miss = Py_NewRef(miss);
    d->bound = Py_XNewRef(bound);
    d->enabled = 1;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); i++) {
        if (append_record(d, PySequence_Fast_GET_ITEM(items, i)) < 0) {
            Py_DECREF(items);
            Py_DECREF(d);
            return NULL;
        }
    }
    Py_DECREF(items);
    return (PyObject *)d;
}

static int
dispatcher_traverse(PyObject *self, visitproc visit, void *arg)
{
    dispatcher *d = (dispatcher *)self;
    Py_VISIT(d->miss);
    Py_VISIT(d->failed);
    Py_VISIT(d->bound);
    for (Py_ssize_t i = 0; i < d->n_records; i++) {
        Py_VISIT(d->records[i]);
    }
    return 0;
}

static int
dispatcher_clear(PyObject *self)
{
    dispatcher *d = (dispatcher *)self;
    drop_records(d);
    Py_CLEAR(d->miss);
    Py_CLEAR(d->failed);
    d->enabled = 0; /* bound stays: a call under way may still pass it on */
    return 0;
}

static void
dispatcher_dealloc(PyObject *self)
{
    dispatcher *d = (dispatcher *)self;
    PyObject_GC_UnTrack(self);
    if (d->weakrefs != NULL) {
        PyObject_ClearWeakRefs(self);
    }
    dispatcher_clear(self);
    Py_CLEAR(d->bound);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef dispatcher_methods[] = {
    {"add", dispatcher_add, METH_O, "add(record): try this record first from now on"},
    {"remove", dispatcher_remove, METH_O,
     "remove(record): ValueError if it is not among the records"},
    {"clear", dispatcher_drop, METH_NOARGS, "clear(): drop all records"},
    {NULL},
};

static PyMemberDef dispatcher_members[] = {
    {"miss", T_OBJECT, offsetof(dispatcher, miss), READONLY,
     "called as miss(args, kwargs) when no record hits"},
    {"failed", T_OBJECT, offsetof(dispatcher, failed), 0,
     "called as failed(record, args, kwargs, error, in_graph) when a record that serves a call "
     "fails: what it returns is the result; or None"},
    {"bound", T_OBJECT, offsetof(dispatcher, bound), READONLY,
     "first argument of every call, or None"},
    {"misses", T_ULONGLONG, offsetof(dispatcher, misses), 0,
     "number of calls that no record served"},
    {"enabled", T_BOOL, offsetof(dispatcher, enabled), 0, "False: every call is a miss"},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(dispatcher, weakrefs), READONLY, NULL},
    {NULL},
};

static PyGetSetDef dispatcher_getset[] = {
    {"records", dispatcher_get_records, NULL, "the records, most recently hit first (a copy)",
     NULL},
    {NULL},
};

static PyTypeObject dispatcher_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "magjit._C.Dispatcher",
    .tp_basicsize = sizeof(dispatcher),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "Dispatcher(miss, records=(), bound=<none>): callable that serves calls from records",
    .tp_new = dispatcher_new,
    .tp_dealloc = dispatcher_dealloc,
    .tp_traverse = dispatcher_traverse,
    .tp_clear = dispatcher_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(dispatcher, vectorcall),
    .tp_weaklistoffset = offsetof(dispatcher, weakrefs),
    .tp_methods = dispatcher_methods,
    .tp_members = dispatcher_members,
    .tp_getset = dispatcher_getset,
};

static PyMethodDef functions[] = {
    {"force_misses", set_force_misses, METH_O,
     "force_misses(on): whether every call of every dispatcher is a miss"},
    {"current_call", current_call, METH_NOARGS,
     "current_call(): the number of this thread's outermost call of a dispatcher; 0: there is none"},
    {NULL},
};

int
mj_init_dispatch(PyObject *module)
{
    if (PyModule_AddFunctions(module, functions) < 0) {
        return -1;
    }
    if (PyModule_AddType(module, &mj_record_type) < 0) {
        return -1;
    }
    return PyModule_AddType(module, &dispatcher_type);
}
