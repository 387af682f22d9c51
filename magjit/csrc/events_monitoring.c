/* Source of events on CPython 3.12 and later: sys.monitoring.
 *
 * Entries and unwinding are switched on for all code; instructions, returns and yields only for
 * code objects of which a frame is observed.  Events come from all threads and are filtered here.
 * Another tool keeps its own tool id, so debuggers and coverage are not disturbed. */
#include "tracer.h"

#if MJ_PY312

enum { PY_START, PY_RESUME, PY_THROW, PY_UNWIND, PY_RETURN, PY_YIELD, INSTRUCTION, LINE, N_EVENTS };

static const char *const event_names[N_EVENTS] = {
    "PY_START",  "PY_RESUME", "PY_THROW",    "PY_UNWIND",
    "PY_RETURN", "PY_YIELD",  "INSTRUCTION", "LINE",
};

/* Unreserved tool ids first, then those meant for optimizers, profilers, coverage and debuggers. */
#define N_TOOLS 6 /* that programs may use */

static const int tool_ids[N_TOOLS] = {4, 3, 5, 2, 1, 0};

#define RECURSION_HEADROOM 50

static PyObject *callbacks[N_EVENTS];
static PyObject *disable; /* sys.monitoring.DISABLE: no more events from this instruction */
static long event_bits[N_EVENTS];

/* ---- callbacks ---- */

static inline Tracer *
observing(PyThreadState *tstate)
{
    Tracer *tracer = mj_active_tracer;
    if (tracer == NULL || tracer->tstate != tstate || !tracer->attached || tracer->paused > 0) {
        return NULL;
    }
    return tracer;
}

/* The first instruction of a line.  Where the callback of another tool for the line returns DISABLE
 * (coverage tools do), CPython 3.12 and 3.13 make no INSTRUCTION event of that instruction: then the
 * LINE event stands for it. */
static int
on_line(Tracer *tracer, mj_frame *frame, int here)
{
    tracer->line_frame = frame;
    tracer->line_unit = here;
    return mj_on_instruction(tracer, frame, here) < 0 ? -1 : 0;
}

static int
on_instruction(Tracer *tracer, mj_frame *frame, int here)
{
    bool known = tracer->line_frame == frame && tracer->line_unit == here;
    tracer->line_frame = NULL;
    return known ? 0 : mj_on_instruction(tracer, frame, here);
}

static PyObject *
dispatch(int event, PyObject *value)
{
    PyThreadState *tstate = PyThreadState_Get();
    Tracer *tracer = observing(tstate);
    if (tracer == NULL) {
        Py_RETURN_NONE;
    }
    mj_frame *frame = mj_frame_top(tstate);
    int result = 0;
    Py_INCREF(tracer);
    switch (event) {
    case INSTRUCTION:
        result = on_instruction(tracer, frame, mj_frame_unit(frame));
        break;
    case LINE:
        result = on_line(tracer, frame, mj_frame_unit(frame));
        break;
    case PY_START:
        result = mj_on_entry(tracer, frame, true);
        break;
    case PY_RESUME:
    case PY_THROW:
        result = mj_on_entry(tracer, frame, false);
        break;
    case PY_RETURN:
        result = mj_on_exit(tracer, frame, value);
        break;
    case PY_UNWIND:
        result = mj_on_exit(tracer, frame, NULL);
        break;
    case PY_YIELD:
        result = mj_on_yield(tracer, frame);
        break;
    }
    Py_DECREF(tracer);
    if (result < 0) {
        return NULL;
    }
    return Py_NewRef(result > 0 ? disable : Py_None);
}

#define CALLBACK(event)                                                                            \
    static PyObject *on_##event(PyObject *self, PyObject *const *args, Py_ssize_t n)               \
    {                                                                                              \
        return dispatch(event, n > 2 ? args[2] : NULL);                                            \
    }

CALLBACK(PY_START)
CALLBACK(PY_RESUME)
CALLBACK(PY_THROW)
CALLBACK(PY_UNWIND)
CALLBACK(PY_RETURN)
CALLBACK(PY_YIELD)
CALLBACK(INSTRUCTION)
CALLBACK(LINE)

static PyMethodDef callback_defs[N_EVENTS] = {
    {"magjit_py_start", (PyCFunction)(void (*)(void))on_PY_START, METH_FASTCALL, NULL},
    {"magjit_py_resume", (PyCFunction)(void (*)(void))on_PY_RESUME, METH_FASTCALL, NULL},
    {"magjit_py_throw", (PyCFunction)(void (*)(void))on_PY_THROW, METH_FASTCALL, NULL},
    {"magjit_py_unwind", (PyCFunction)(void (*)(void))on_PY_UNWIND, METH_FASTCALL, NULL},
    {"magjit_py_return", (PyCFunction)(void (*)(void))on_PY_RETURN, METH_FASTCALL, NULL},
    {"magjit_py_yield", (PyCFunction)(void (*)(void))on_PY_YIELD, METH_FASTCALL, NULL},
    {"magjit_instruction", (PyCFunction)(void (*)(void))on_INSTRUCTION, METH_FASTCALL, NULL},
    {"magjit_line", (PyCFunction)(void (*)(void))on_LINE, METH_FASTCALL, NULL},
};

static int
prepare(PyObject *monitoring)
{
    if (callbacks[N_EVENTS - 1] != NULL) {
        return 0;
    }
    disable = PyObject_GetAttrString(monitoring, "DISABLE");
    PyObject *events = disable == NULL ? NULL : PyObject_GetAttrString(monitoring, "events");
    for (int i = 0; events != NULL && i < N_EVENTS; i++) {
        PyObject *bit = PyObject_GetAttrString(events, event_names[i]);
        event_bits[i] = bit == NULL ? -1 : PyLong_AsLong(bit);
        Py_XDECREF(bit);
        if (event_bits[i] == -1) {
            break;
        }
        callbacks[i] = PyCFunction_New(&callback_defs[i], NULL);
    }
    Py_XDECREF(events);
    return callbacks[N_EVENTS - 1] == NULL ? -1 : 0;
}

/* ---- the tool ---- */

static int
call_monitoring(Tracer *tracer, const char *name, const char *format, ...)
{
    va_list items;
    va_start(items, format);
    PyObject *args = Py_VaBuildValue(format, items);
    va_end(items);
    PyObject *function = args == NULL ? NULL : PyObject_GetAttrString(tracer->monitoring, name);
    PyObject *result = function == NULL ? NULL : PyObject_CallObject(function, args);
    Py_XDECREF(args);
    Py_XDECREF(function);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static int
claim_tool(Tracer *tracer)
{
    tracer->other_tools = false;
    for (int i = 0; i < N_TOOLS; i++) {
        PyObject *owner = PyObject_CallMethod(tracer->monitoring, "get_tool", "i", tool_ids[i]);
        if (owner == NULL) {
            return -1;
        }
        Py_DECREF(owner);
        if (owner != Py_None) {
            tracer->other_tools = true;
        }
        else if (tracer->tool_id < 0) {
            tracer->tool_id = tool_ids[i];
        }
    }
    if (tracer->tool_id < 0) {
        PyErr_SetString(PyExc_RuntimeError, "sys.monitoring: every tool id is in use");
        return -1;
    }
    int tool = tracer->tool_id;
    tracer->tool_id = -1; /* until it is ours */
    if (call_monitoring(tracer, "use_tool_id", "(is)", tool, "magjit") < 0) {
        return -1;
    }
    tracer->tool_id = tool;
    return 0;
}

static int
set_local_events(Tracer *tracer, mj_code *code, int events)
{
    if (code->local_events == events) {
        return 0;
    }
    int result =
        call_monitoring(tracer, "set_local_events", "(iOi)", tracer->tool_id, code->code, events);
    if (result == 0) {
        code->local_events = events;
    }
    return result;
}

/* Takes back all that was switched on; -1 with an exception as soon as something could not be. */
static int
release_tool(Tracer *tracer)
{
    for (size_t i = 0; tracer->codes != NULL && i <= tracer->codes_mask; i++) {
        if (tracer->codes[i] != NULL && set_local_events(tracer, tracer->codes[i], 0) < 0) {
            return -1;
        }
    }
    if (call_monitoring(tracer, "set_events", "(ii)", tracer->tool_id, 0) < 0) {
        return -1;
    }
    for (int i = 0; i < N_EVENTS; i++) {
        if (call_monitoring(tracer, "register_callback", "(ilO)", tracer->tool_id, event_bits[i],
                            Py_None) < 0) {
            return -1;
        }
    }
    if (call_monitoring(tracer, "free_tool_id", "(i)", tracer->tool_id) < 0) {
        return -1;
    }
    tracer->tool_id = -1;
    Py_CLEAR(tracer->monitoring);
    return 0;
}

int
mj_events_attach(Tracer *tracer)
{
    tracer->monitoring = Py_XNewRef(PySys_GetObject("monitoring"));
    if (tracer->monitoring == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "sys.monitoring is missing");
        return -1;
    }
    tracer->tool_id = -1;
    tracer->line_frame = NULL;
    if (prepare(tracer->monitoring) < 0 || claim_tool(tracer) < 0) {
        Py_CLEAR(tracer->monitoring);
        return -1;
    }
    int failed = 0;
    for (int i = 0; i < N_EVENTS && !failed; i++) {
        failed = call_monitoring(tracer, "register_callback", "(ilO)", tracer->tool_id,
                                 event_bits[i], callbacks[i]);
    }
    long events =
        event_bits[PY_START] | event_bits[PY_RESUME] | event_bits[PY_THROW] | event_bits[PY_UNWIND];
    tracer->attached = true;
    if (failed || call_monitoring(tracer, "set_events", "(il)", tracer->tool_id, events) < 0) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        if (mj_events_detach(tracer) < 0) {
            PyErr_Clear();
        }
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    return 0;
}

int
mj_events_detach(Tracer *tracer)
{
    PyThreadState *tstate = tracer->tstate;
    if (tracer->attached && tracer->paused > 0) {
        PyThreadState_LeaveTracing(tstate);
        tracer->paused = 0;
    }
    tracer->attached = false;
    /* The error that ends observation may be that the program has used up its C stack. */
    tstate->c_recursion_remaining += RECURSION_HEADROOM;
    PyObject *interrupt = NULL;
    for (int tries = 0; tracer->monitoring != NULL && tries < MJ_DETACH_TRIES; tries++) {
        if (release_tool(tracer) < 0) {
            mj_keep_interrupt(&interrupt);
        }
    }
    tstate->c_recursion_remaining -= RECURSION_HEADROOM;
    return mj_raise_interrupt(interrupt);
}

int
mj_events_observe(Tracer *tracer, mj_entry *entry, mj_frame *frame)
{
    long events = event_bits[PY_RETURN] | event_bits[PY_YIELD];
    if (entry->state != NULL) {
        events |= event_bits[INSTRUCTION];
        if (tracer->other_tools) {
            events |= event_bits[LINE];
        }
    }
    return set_local_events(tracer, entry->code, entry->code->local_events | (int)events);
}

void
mj_events_release(Tracer *tracer, mj_entry *entry, mj_frame *frame)
{
}

void
mj_events_pause(Tracer *tracer)
{
    PyThreadState_EnterTracing(tracer->tstate);
}

void
mj_events_resume(Tracer *tracer)
{
    PyThreadState_LeaveTracing(tracer->tstate);
}

#endif /* MJ_PY312 */
