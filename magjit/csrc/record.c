/* Record: one way to serve a call.
 *
 *     record := program graph_fn input_slots finish finish_slots
 *
 * Between a program's verdict and the moment when the record holds references to everything that it
 * needs, no code runs.  From then on the record may be dropped, or be served again, by user code.
 */
#include "dispatch.h"

#include <structmember.h>

/* Calls with more inputs gather them on the heap. */
enum { STACK_INPUTS = 1024 };

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
read_slots(PyObject *tuple, const guard_program *program, int32_t *out)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        long slot = PyLong_AsLong(PyTuple_GET_ITEM(tuple, i));
        if (slot == -1 && PyErr_Occurred()) {
            return -1;
        }
        if (slot < 0 || slot >= program->n_slots || !program->written[slot]) {
            PyErr_Format(PyExc_ValueError, "slot %ld is not one that the program fills", slot);
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
    if (r->slots == NULL || set_finish(r, finish) < 0 ||
        read_slots(inputs, r->program, r->slots) < 0 ||
        (finish_slots != NULL &&
         read_slots(finish_slots, r->program, r->slots + r->n_inputs) < 0)) {
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
    {"pure", T_BOOL, offsetof(record, pure), 0,
     "whether a call changes no data of a tensor that existed before, nor runs code that might"},
    {NULL},
};

static PyGetSetDef record_getset[] = {
    {"input_slots", record_get_slots, NULL, "slots of the graph's inputs", NULL},
    {"finish_slots", record_get_slots, NULL, "slots of the further arguments of finish", "finish"},
    {"finish", record_get_finish, NULL, "None, the index of the output to return, or a callable",
     NULL},
    {NULL},
};

PyTypeObject mj_record_type = {
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
          Py_ssize_t n_inputs, Py_ssize_t n_finish, bool *in_graph)
{
    PyObject **inputs = values + 1, **further = inputs + n_inputs + 1;
    PyObject *outs = PyObject_Vectorcall(graph_fn, inputs,
                                         (size_t)n_inputs | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL),
             *result = outs;
    *in_graph = outs == NULL;
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
serve_with(record *r, guard_run *run, PyObject **values, bool *in_graph)
{
    Py_ssize_t n_inputs = r->n_inputs, n_finish = r->n_finish, item = r->finish_item;
    gather(values + 1, run->slots, r->slots, n_inputs);
    gather(values + n_inputs + 2, run->slots, r->slots + n_inputs, n_finish);
    PyObject *graph_fn = Py_NewRef(r->graph_fn), *finish = Py_XNewRef(r->finish);
    r->hits++;
    mj_program_leave(run);
    PyObject *result = run_graph(graph_fn, finish, item, values, n_inputs, n_finish, in_graph);
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
serve_on_stack(record *r, guard_run *run, size_t n, bool *in_graph)
{
    PyObject *values[n];
    return serve_with(r, run, values, in_graph);
}

PyObject *
mj_record_serve(record *r, guard_run *run, bool *in_graph)
{
    *in_graph = false;
    size_t n = (size_t)(r->n_inputs + r->n_finish + 2);
    if (n <= STACK_INPUTS) {
        return serve_on_stack(r, run, n, in_graph);
    }
    PyObject **values = PyMem_Malloc(n * sizeof(PyObject *));
    if (values == NULL) {
        mj_program_leave(run);
        return PyErr_NoMemory();
    }
    PyObject *result = serve_with(r, run, values, in_graph);
    PyMem_Free(values);
    return result;
}
