/* _C.Tracer: the Python type around the tracer's protocol. */
#include "tracer.h"

#include <structmember.h>

Tracer *mj_active_tracer;

static int
take_handlers(Tracer *tracer, PyObject *handlers)
{
    Py_ssize_t count = PyList_GET_SIZE(handlers);
    if (count > MJ_KINDS) {
        PyErr_Format(PyExc_ValueError, "at most %d handlers", MJ_KINDS);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *handler = PyList_GET_ITEM(handlers, i);
        if (handler != Py_None) {
            tracer->handlers[i] = Py_NewRef(handler);
        }
    }
    return 0;
}

static PyObject *
tracer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"handlers", "on_frame", "on_exit", "trivial", "plan_for", NULL};
    PyObject *handlers, *on_frame, *on_exit, *trivial, *plan_for;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOO!O:Tracer", names, &PyList_Type, &handlers,
                                     &on_frame, &on_exit, &PyFrozenSet_Type, &trivial, &plan_for)) {
        return NULL;
    }
    Tracer *tracer = (Tracer *)type->tp_alloc(type, 0);
    if (tracer == NULL) {
        return NULL;
    }
    tracer->on_frame = Py_NewRef(on_frame);
    tracer->on_exit = Py_NewRef(on_exit);
    tracer->plan_for = Py_NewRef(plan_for);
    tracer->trivial = Py_NewRef(trivial);
    if (take_handlers(tracer, handlers) < 0 || mj_trivial_build(tracer, trivial) < 0) {
        Py_DECREF(tracer);
        return NULL;
    }
    return (PyObject *)tracer;
}

static int
tracer_traverse(Tracer *tracer, visitproc visit, void *arg)
{
    Py_VISIT(tracer->on_frame);
    Py_VISIT(tracer->on_exit);
    Py_VISIT(tracer->plan_for);
    Py_VISIT(tracer->trivial);
    Py_VISIT(tracer->error);
    Py_VISIT(tracer->previous_object);
    Py_VISIT(tracer->monitoring);
    for (int i = 0; i < MJ_KINDS; i++) {
        Py_VISIT(tracer->handlers[i]);
    }
    return mj_tables_traverse(tracer, visit, arg);
}

static int
tracer_clear(Tracer *tracer)
{
    mj_tables_clear(tracer);
    Py_CLEAR(tracer->on_frame);
    Py_CLEAR(tracer->on_exit);
    Py_CLEAR(tracer->plan_for);
    Py_CLEAR(tracer->error);
    Py_CLEAR(tracer->previous_object);
    Py_CLEAR(tracer->monitoring);
    for (int i = 0; i < MJ_KINDS; i++) {
        Py_CLEAR(tracer->handlers[i]);
    }
    return 0;
}

static void
tracer_dealloc(Tracer *tracer)
{
    /* never while it runs: mj_active_tracer is a strong reference */
    PyObject_GC_UnTrack(tracer);
    tracer_clear(tracer);
    Py_CLEAR(tracer->trivial);
    PyMem_Free(tracer->trivial_slots);
    PyMem_Free(tracer->entries);
    PyMem_Free(tracer->suspended);
    Py_TYPE(tracer)->tp_free(tracer);
}

PyDoc_STRVAR(
    start_doc,
    "start()\n\n"
    "Begins to observe the calling thread: not the frames that already run, but those entered\n"
    "from now on.  Raises RuntimeError while a tracer runs, in any thread.");

static PyObject *
tracer_start(Tracer *tracer, PyObject *ignored)
{
    if (mj_active_tracer != NULL) {
        PyErr_SetString(PyExc_RuntimeError, mj_active_tracer == tracer
                                                ? "the tracer is already running"
                                                : "another tracer is running");
        return NULL;
    }
    Py_CLEAR(tracer->error);
    tracer->n_instructions = tracer->n_handled = tracer->n_frames = 0;
    tracer->paused = 0;
    tracer->tstate = PyThreadState_Get();
    mj_active_tracer = (Tracer *)Py_NewRef(tracer);
    if (mj_events_attach(tracer) < 0) {
        tracer->tstate = NULL;
        Py_CLEAR(mj_active_tracer);
        return NULL;
    }
    tracer->running = true;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    stop_doc,
    "stop()\n\n"
    "Ends observation and puts an earlier trace function back; does nothing when not running.\n"
    "Whatever ended the observation early is in the attribute error.  Raises RuntimeError in\n"
    "another thread than that of start().");

static PyObject *
tracer_stop(Tracer *tracer, PyObject *ignored)
{
    if (!tracer->running) {
        Py_RETURN_NONE;
    }
    if (tracer->tstate != PyThreadState_Get()) {
        PyErr_SetString(PyExc_RuntimeError, "the tracer was started in another thread");
        return NULL;
    }
    int result = mj_events_detach(tracer);
    tracer->running = false;
    tracer->tstate = NULL;
    tracer->watches = false;
    memset(tracer->watched, 0, sizeof(tracer->watched));
    Tracer *active = mj_active_tracer;
    mj_active_tracer = NULL;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    mj_tables_clear(tracer);
    PyErr_Restore(type, value, traceback);
    Py_DECREF(active);
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    pause_doc,
    "pause()\n\n"
    "Suspends all events until resume() was called as often; the code that runs meanwhile is not\n"
    "slowed down.");

static PyObject *
tracer_pause(Tracer *tracer, PyObject *ignored)
{
    if (tracer->attached && tracer->tstate != PyThreadState_Get()) {
        PyErr_SetString(PyExc_RuntimeError, "the tracer was started in another thread");
        return NULL;
    }
    if (tracer->attached && tracer->paused++ == 0) {
        mj_events_pause(tracer);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(resume_doc,
             "resume()\n\n"
             "Undoes one pause().  Frames that were left meanwhile are forgotten without on_exit.");

static PyObject *
tracer_resume(Tracer *tracer, PyObject *ignored)
{
    if (tracer->attached && tracer->tstate != PyThreadState_Get()) {
        PyErr_SetString(PyExc_RuntimeError, "the tracer was started in another thread");
        return NULL;
    }
    if (tracer->attached && tracer->paused == 0) {
        PyErr_SetString(PyExc_RuntimeError, "resume() without pause()");
        return NULL;
    }
    if (tracer->attached && --tracer->paused == 0) {
        mj_entries_drop_dead(tracer);
        mj_suspended_drop_dead(tracer);
        mj_events_resume(tracer);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(watch_doc,
             "watch(obj)\n\n"
             "From now on an instruction that uses this object makes an event even if its inputs\n"
             "are all of trivial types, or if it only puts them into a new object (HOLD).  Some\n"
             "other objects may be reported as well.  The caller keeps the object alive.");

static PyObject *
tracer_watch(Tracer *tracer, PyObject *object)
{
    tracer->watched[mj_hash_pointer(object) & (MJ_WATCHED - 1)] = 1;
    tracer->watches = true;
    Py_RETURN_NONE;
}

/* The entry of a frame object's frame, or NULL: an error, or no entry. */
static mj_entry *
entry_of_object(Tracer *tracer, PyObject *object)
{
    if (!PyFrame_Check(object)) {
        PyErr_Format(PyExc_TypeError, "expected a frame, not %.100s", Py_TYPE(object)->tp_name);
        return NULL;
    }
    return mj_entry_find(tracer, ((PyFrameObject *)object)->f_frame);
}

PyDoc_STRVAR(state_of_doc,
             "state_of(frame) -> object or None\n\n"
             "The state that on_frame gave for a frame that is observed now.");

static PyObject *
tracer_state_of(Tracer *tracer, PyObject *object)
{
    mj_entry *entry = entry_of_object(tracer, object);
    if (entry == NULL && PyErr_Occurred()) {
        return NULL;
    }
    return Py_NewRef(entry == NULL || entry->state == NULL ? Py_None : entry->state);
}

PyDoc_STRVAR(at_next_doc,
             "at_next(frame, wake)\n\n"
             "Nothing that the running instruction of an observed frame calls is reported, nor its\n"
             "results; at the next event of the frame wake(offset) is called first.  It is dropped\n"
             "when the frame exits.  Raises ValueError for a frame that is not observed.");

static PyObject *
tracer_at_next(Tracer *tracer, PyObject *args)
{
    PyObject *object, *wake;
    if (!PyArg_ParseTuple(args, "OO:at_next", &object, &wake)) {
        return NULL;
    }
    mj_entry *entry = entry_of_object(tracer, object);
    if (entry == NULL || entry->state == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "this frame is not observed");
        }
        return NULL;
    }
    Py_CLEAR(entry->pending);
    Py_XSETREF(entry->wake, Py_NewRef(wake));
    entry->opaque = true;
    Py_RETURN_NONE;
}

static PyObject *
tracer_counts(Tracer *tracer, void *closure)
{
    return Py_BuildValue("(KKK)", tracer->n_instructions, tracer->n_handled, tracer->n_frames);
}

static PyMethodDef tracer_methods[] = {
    {"start", (PyCFunction)tracer_start, METH_NOARGS, start_doc},
    {"stop", (PyCFunction)tracer_stop, METH_NOARGS, stop_doc},
    {"pause", (PyCFunction)tracer_pause, METH_NOARGS, pause_doc},
    {"resume", (PyCFunction)tracer_resume, METH_NOARGS, resume_doc},
    {"watch", (PyCFunction)tracer_watch, METH_O, watch_doc},
    {"state_of", (PyCFunction)tracer_state_of, METH_O, state_of_doc},
    {"at_next", (PyCFunction)tracer_at_next, METH_VARARGS, at_next_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef tracer_members[] = {
    {"error", T_OBJECT, offsetof(Tracer, error), READONLY,
     "The exception that ended observation, or None."},
    {"paused", T_INT, offsetof(Tracer, paused), READONLY, "How many pause() are not yet undone."},
    {"running", T_BOOL, offsetof(Tracer, running), READONLY, "Between start() and stop()."},
    {"attached", T_BOOL, offsetof(Tracer, attached), READONLY,
     "Running, and no handler has failed."},
    {"confines", T_BOOL, offsetof(Tracer, confines), 0,
     "Go on when a handler raises what is no Exception: the program's own handlers run, too."},
    {"resuming", T_BOOL, offsetof(Tracer, resuming), READONLY,
     "True while on_frame is asked about a generator whose beginning was not observed."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef tracer_getset[] = {
    {"counts", (getter)tracer_counts, NULL,
     "Of this run: (instructions seen, events handled, frames that on_frame was asked about).",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    tracer_doc,
    "Tracer(handlers, on_frame, on_exit, trivial, plan_for)\n\n"
    "Observes the frames of one thread in C.  magjit.monitor.reference defines the protocol.");

static PyTypeObject tracer_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "magjit._C.Tracer",
    .tp_basicsize = sizeof(Tracer),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = tracer_doc,
    .tp_new = tracer_new,
    .tp_traverse = (traverseproc)tracer_traverse,
    .tp_clear = (inquiry)tracer_clear,
    .tp_dealloc = (destructor)tracer_dealloc,
    .tp_methods = tracer_methods,
    .tp_members = tracer_members,
    .tp_getset = tracer_getset,
};

int
mj_init_tracer(PyObject *module)
{
    if (PyType_Ready(&tracer_type) < 0 ||
        PyModule_AddObjectRef(module, "Tracer", (PyObject *)&tracer_type) < 0) {
        return -1;
    }
    return PyModule_AddIntConstant(module, "UNIT_SIZE", sizeof(mj_unit));
}
