/* Record and Dispatcher: the path of every call of a compiled function.
 *
 *     Dispatcher(args) = first record, most recently hit first, whose program accepts args -> its
 * mock | miss(args, kwargs)
 *
 * Between a program's verdict and the moment when the record holds references to everything that it
 * needs, no code runs.  From then on the dispatcher and its records may be changed, called again or
 * dropped by user code.
 */
#include "guard.h"

#include <structmember.h>

/* Calls with more inputs gather them on the heap. */
enum { STACK_INPUTS = 1024 };

/* ---- records ---- */

typedef struct {
    PyObject_HEAD guard_program *program;
    PyObject *graph_fn;
    PyObject *finish;       /* callable, or NULL */
    Py_ssize_t finish_item; /* item of the outputs to return, or -1 */
    Py_ssize_t n_inputs, n_finish;
    int32_t *slots; /* n_inputs of the graph, then n_finish */
    unsigned long long hits;
} record;

static PyTypeObject record_type;

static PyObject *
slots_tuple(const int32_t *slots, Py_ssize_t n)
{
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) {
        PyObject *item = PyLong_FromLong(slots[i]);
        if (item == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, item);
    }
    return tuple;
}

static int
read_slots(PyObject *tuple, Py_ssize_t n_slots, int32_t *out)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        long slot = PyLong_AsLong(PyTuple_GET_ITEM(tuple, i));
        if (slot == -1 && PyErr_Occurred()) {
            return -1;
        }
        if (slot < 0 || slot >= n_slots) {
            PyErr_Format(PyExc_ValueError, "slot %ld out of range", slot);
            return -1;
        }
        out[i] = (int32_t)slot;
    }
    return 0;
}

static int
set_finish(record *r, PyObject *finish)
{
    r->finish_item = -1;
    if (finish == Py_None) {
        return 0;
    }
    if (PyLong_CheckExact(finish)) {
        r->finish_item = PyLong_AsSsize_t(finish);
        if (r->finish_item < 0) {
            PyErr_SetString(PyExc_ValueError, "finish: expected the index of an output");
            return -1;
        }
        return 0;
    }
    if (!PyCallable_Check(finish)) {
        PyErr_SetString(PyExc_TypeError, "finish: expected None, an int or a callable");
        return -1;
    }
    r->finish = Py_NewRef(finish);
    return 0;
}

static PyObject *
record_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"program", "graph_fn",     "input_slots",
                               "finish",  "finish_slots", NULL};
    PyObject *program, *graph_fn, *inputs, *finish = Py_None, *finish_slots = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO!|OO!:Record", keywords, &mj_program_type,
                                     &program, &graph_fn, &PyTuple_Type, &inputs, &finish,
                                     &PyTuple_Type, &finish_slots)) {
        return NULL;
    }
    if (!PyCallable_Check(graph_fn)) {
        PyErr_SetString(PyExc_TypeError, "graph_fn: expected a callable");
        return NULL;
    }
    record *r = (record *)type->tp_alloc(type, 0);
    if (r == NULL) {
        return NULL;
    }
    r->program = (guard_program *)Py_NewRef(program);
    r->graph_fn = Py_NewRef(graph_fn);
    r->n_inputs = PyTuple_GET_SIZE(inputs);
    r->n_finish = finish_slots != NULL ? PyTuple_GET_SIZE(finish_slots) : 0;
    r->slots = PyMem_Calloc((size_t)(r->n_inputs + r->n_finish + 1), sizeof(int32_t));
    Py_ssize_t n_slots = r->program->n_slots;
    if (r->slots == NULL || set_finish(r, finish) < 0 ||
        read_slots(inputs, n_slots, r->slots) < 0 ||
        (finish_slots != NULL && read_slots(finish_slots, n_slots, r->slots + r->n_inputs) < 0)) {
        if (!PyErr_Occurred()) {
            PyErr_NoMemory();
        }
        Py_DECREF(r);
        return NULL;
    }
    return (PyObject *)r;
}

static int
record_traverse(PyObject *self, visitproc visit, void *arg)
{
    record *r = (record *)self;
    Py_VISIT(r->program);
    Py_VISIT(r->graph_fn);
    Py_VISIT(r->finish);
    return 0;
}

static int
record_clear(PyObject *self)
{
    record *r = (record *)self;
    Py_CLEAR(r->program); /* a record without a program never hits */
    Py_CLEAR(r->graph_fn);
    Py_CLEAR(r->finish);
    return 0;
}

static void
record_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    record_clear(self);
    PyMem_Free(((record *)self)->slots);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
record_get_slots(PyObject *self, void *closure)
{
    record *r = (record *)self;
    return closure == NULL ? slots_tuple(r->slots, r->n_inputs)
                           : slots_tuple(r->slots + r->n_inputs, r->n_finish);
}

static PyObject *
record_get_finish(PyObject *self, void *closure)
{
    record *r = (record *)self;
    if (r->finish_item >= 0) {
        return PyLong_FromSsize_t(r->finish_item);
    }
    return Py_NewRef(r->finish != NULL ? r->finish : Py_None);
}

static PyMemberDef record_members[] = {
    {"program", T_OBJECT, offsetof(record, program), READONLY, "the GuardProgram"},
    {"graph_fn", T_OBJECT, offsetof(record, graph_fn), READONLY, "the compiled graph"},
    {"hits", T_ULONGLONG, offsetof(record, hits), 0, "number of calls that this record served"},
    {NULL},
};

static PyGetSetDef record_getset[] = {
    {"input_slots", record_get_slots, NULL, "slots of the graph's inputs", NULL},
    {"finish_slots", record_get_slots, NULL, "slots of the further arguments of finish", "finish"},
    {"finish", record_get_finish, NULL, "None, the index of the output to return, or a callable",
     NULL},
    {NULL},
};

static PyTypeObject record_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "magjit._C.Record",
    .tp_basicsize = sizeof(record),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Record(program, graph_fn, input_slots, finish=None, finish_slots=()): one way to "
              "serve a call",
    .tp_new = record_new,
    .tp_dealloc = record_dealloc,
    .tp_traverse = record_traverse,
    .tp_clear = record_clear,
    .tp_members = record_members,
    .tp_getset = record_getset,
};

/* ---- serving a call ---- */

static PyObject *
output_item(PyObject *outs, Py_ssize_t i)
{
    if (PyTuple_CheckExact(outs) && i < PyTuple_GET_SIZE(outs)) {
        return Py_NewRef(PyTuple_GET_ITEM(outs, i));
    }
    if (PyList_CheckExact(outs) && i < PyList_GET_SIZE(outs)) {
        return Py_NewRef(PyList_GET_ITEM(outs, i));
    }
    return PySequence_GetItem(outs, i);
}

/* values: one free place, the graph's inputs, one free place, the further arguments of finish; all
 * owned here. graph_fn and finish are owned by the caller, so that the record may go away
 * meanwhile. */
static PyObject *
run_graph(PyObject *graph_fn, PyObject *finish, Py_ssize_t item, PyObject **values,
          Py_ssize_t n_inputs, Py_ssize_t n_finish)
{
    PyObject **inputs = values + 1, **further = inputs + n_inputs + 1;
    PyObject *outs = PyObject_Vectorcall(graph_fn, inputs,
                                         (size_t)n_inputs | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL),
             *result = outs;
    if (outs != NULL && finish != NULL) {
        further[-1] = outs;
        result = PyObject_Vectorcall(finish, further - 1, (size_t)n_finish + 1, NULL);
        Py_DECREF(outs);
    }
    else if (outs != NULL && item >= 0) {
        result = output_item(outs, item);
        Py_DECREF(outs);
    }
    return result;
}

static inline void
gather(PyObject **to, PyObject **slots, const int32_t *which, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        to[i] = Py_NewRef(slots[which[i]]);
    }
}

static PyObject *
serve_with(record *r, guard_run *run, PyObject **values)
{
    Py_ssize_t n_inputs = r->n_inputs, n_finish = r->n_finish, item = r->finish_item;
    gather(values + 1, run->slots, r->slots, n_inputs);
    gather(values + n_inputs + 2, run->slots, r->slots + n_inputs, n_finish);
    PyObject *graph_fn = Py_NewRef(r->graph_fn), *finish = Py_XNewRef(r->finish);
    r->hits++;
    mj_program_leave(run);
    PyObject *result = run_graph(graph_fn, finish, item, values, n_inputs, n_finish);
    for (Py_ssize_t i = 0; i < n_inputs; i++) {
        Py_DECREF(values[1 + i]);
    }
    for (Py_ssize_t i = 0; i < n_finish; i++) {
        Py_DECREF(values[n_inputs + 2 + i]);
    }
    Py_XDECREF(finish);
    Py_DECREF(graph_fn);
    return result;
}

static PyObject *
serve_on_stack(record *r, guard_run *run, size_t n)
{
    PyObject *values[n];
    return serve_with(r, run, values);
}

static PyObject *
serve(record *r, guard_run *run)
{
    size_t n = (size_t)(r->n_inputs + r->n_finish + 2);
    if (n <= STACK_INPUTS) {
        return serve_on_stack(r, run, n);
    }
    PyObject **values = PyMem_Malloc(n * sizeof(PyObject *));
    if (values == NULL) {
        mj_program_leave(run);
        return PyErr_NoMemory();
    }
    PyObject *result = serve_with(r, run, values);
    PyMem_Free(values);
    return result;
}

/* ---- dispatchers ---- */

typedef struct {
    PyObject_HEAD vectorcallfunc vectorcall;
    PyObject *miss;
    PyObject *bound; /* first argument of every call, or NULL */
    PyObject *weakrefs;
    record **records; /* most recently hit first */
    Py_ssize_t n_records, capacity;
    unsigned long long misses;
    char enabled;
} dispatcher;

static PyTypeObject dispatcher_type;

static void
move_to_front(dispatcher *d, Py_ssize_t i)
{
    record *r = d->records[i];
    memmove(d->records + 1, d->records, (size_t)i * sizeof(record *));
    d->records[0] = r;
}

static PyObject *
call_miss(dispatcher *d, const guard_call *call)
{
    if (d->miss == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this dispatcher was cleared");
        return NULL;
    }
    PyObject *args = PyTuple_New(call->nargs), *kwargs = PyDict_New(), *result = NULL;
    if (args == NULL || kwargs == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < call->nargs; i++) {
        PyTuple_SET_ITEM(args, i, Py_NewRef(call->args[i]));
    }
    for (Py_ssize_t i = 0; call->kwnames != NULL && i < PyTuple_GET_SIZE(call->kwnames); i++) {
        if (PyDict_SetItem(kwargs, PyTuple_GET_ITEM(call->kwnames, i),
                           call->args[call->nargs + i]) < 0) {
            goto done;
        }
    }
    PyObject *miss = Py_NewRef(d->miss);
    result = PyObject_CallFunctionObjArgs(miss, args, kwargs, NULL);
    Py_DECREF(miss);
done:
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return result;
}

static PyObject *
dispatch(dispatcher *d, const guard_call *call)
{
    for (Py_ssize_t i = 0; d->enabled && i < d->n_records; i++) {
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
            PyObject *result = serve(r, &run);
            Py_DECREF(r);
            return result;
        }
        Py_DECREF(r);
    }
    d->misses++;
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
    Py_DECREF(self);
    return result;
}

/* ---- methods of dispatchers ---- */

static int
append_record(dispatcher *d, PyObject *item)
{
    if (!PyObject_TypeCheck(item, &record_type)) {
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

int
mj_init_dispatch(PyObject *module)
{
    if (PyModule_AddType(module, &record_type) < 0) {
        return -1;
    }
    return PyModule_AddType(module, &dispatcher_type);
}
