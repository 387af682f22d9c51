/* Source of events on CPython 3.11: PyEval_SetTrace, per-opcode events in observed frames only.
 *
 * The trace function carries the object of the trace function that was there before, so that
 * sys.gettrace() gives the program what it would give without us. */
#include "tracer.h"

#if !MJ_PY312
#include <opcode.h>

static inline bool
at_opcode(mj_frame *frame, int opcode, int quickened)
{
    int found = _Py_OPCODE(_PyCode_CODE(frame->f_code)[mj_frame_unit(frame)]);
    return found == opcode || found == quickened;
}

/* Call events come for RESUME at the start (argument 0), after a yield, and for gen.throw(). */
static bool
starts(mj_frame *frame)
{
    if (!mj_frame_is_generator(frame)) {
        return true;
    }
    return at_opcode(frame, RESUME, RESUME_QUICK) &&
           _Py_OPARG(_PyCode_CODE(frame->f_code)[mj_frame_unit(frame)]) == 0;
}

static int
trace_event(PyObject *self, PyFrameObject *object, int what, PyObject *value)
{
    Tracer *tracer = mj_active_tracer;
    if (tracer == NULL || !tracer->attached || tracer->paused > 0) {
        return 0;
    }
    mj_frame *frame = object->f_frame;
    int result = 0;
    Py_INCREF(tracer);
    switch (what) {
    case PyTrace_OPCODE:
        result = mj_on_instruction(tracer, frame, mj_frame_unit(frame)) < 0 ? -1 : 0;
        break;
    case PyTrace_CALL:
        result = mj_on_entry(tracer, frame, starts(frame));
        break;
    case PyTrace_RETURN:
        result = value != NULL && mj_frame_is_generator(frame) &&
                         at_opcode(frame, YIELD_VALUE, YIELD_VALUE)
                     ? mj_on_yield(tracer, frame)
                     : mj_on_exit(tracer, frame, value);
        break;
    default:
        break;
    }
    Py_DECREF(tracer);
    return result;
}

int
mj_events_attach(Tracer *tracer)
{
    PyThreadState *tstate = tracer->tstate;
    tracer->previous_func = tstate->c_tracefunc;
    tracer->previous_object = Py_XNewRef(tstate->c_traceobj);
    if (_PyEval_SetTrace(tstate, trace_event, tracer->previous_object) < 0) {
        Py_CLEAR(tracer->previous_object); /* an audit hook refused */
        return -1;
    }
    tracer->attached = true;
    return 0;
}

static void
restore_frame(const mj_entry *entry, mj_frame *frame)
{
    if (entry->state != NULL && frame->frame_obj != NULL) {
        frame->frame_obj->f_trace_opcodes = entry->restore_opcodes;
        frame->frame_obj->f_trace_lines = entry->restore_lines;
    }
}

int
mj_events_detach(Tracer *tracer)
{
    if (!tracer->attached) {
        return 0;
    }
    PyThreadState *tstate = tracer->tstate;
    if (tracer->paused > 0) {
        PyThreadState_LeaveTracing(tstate);
        tracer->paused = 0;
    }
    tracer->attached = false;
    PyObject *interrupt = NULL;
    for (mj_frame *frame = mj_frame_top(tstate); frame != NULL; frame = frame->previous) {
        mj_entry *entry = mj_entry_find(tracer, frame);
        if (entry != NULL) {
            restore_frame(entry, frame);
        }
    }
    if (tstate->c_tracefunc == trace_event) {
        for (int tries = 0; tries < MJ_DETACH_TRIES; tries++) {
            if (_PyEval_SetTrace(tstate, tracer->previous_func, tracer->previous_object) == 0) {
                break;
            }
            mj_keep_interrupt(&interrupt);
        }
    }
    else if (tracer->error == NULL) {
        /* the program set a trace function of its own, which stays; nothing was seen since */
        PyObject *message =
            PyUnicode_FromString("the program replaced the trace function during observation");
        tracer->error = message == NULL ? NULL : PyObject_CallOneArg(PyExc_RuntimeError, message);
        Py_XDECREF(message);
        PyErr_Clear();
    }
    Py_CLEAR(tracer->previous_object);
    return mj_raise_interrupt(interrupt);
}

int
mj_events_observe(Tracer *tracer, mj_entry *entry, mj_frame *frame)
{
    if (entry->state != NULL) {
        PyFrameObject *object = frame->frame_obj;
        entry->restore_opcodes = object->f_trace_opcodes;
        entry->restore_lines = object->f_trace_lines;
        object->f_trace_opcodes = 1;
        object->f_trace_lines = 0;
    }
    return 0;
}

void
mj_events_release(Tracer *tracer, mj_entry *entry, mj_frame *frame)
{
    restore_frame(entry, frame);
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

#endif /* !MJ_PY312 */
