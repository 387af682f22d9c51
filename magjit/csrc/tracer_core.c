/* The protocol of the tracer: what happens when a frame is entered, executes an instruction, yields
 * or exits.
 *
 * Event sources call in with the frame concerned; handlers are Python objects.  The interpreter
 * runs no events while a handler runs, so the stack of entries changes under a handler only if the
 * handler itself calls stop(): every call of a handler is followed by a look at tracer->attached.
 */
#include "tracer.h"

/* ---- failures of handlers ---- */

void
mj_keep_interrupt(PyObject **interrupt)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (*interrupt == NULL && !PyErr_GivenExceptionMatches(type, PyExc_Exception)) {
        *interrupt = Py_NewRef(value);
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

int
mj_raise_interrupt(PyObject *interrupt)
{
    if (interrupt == NULL) {
        return 0;
    }
    PyErr_SetObject((PyObject *)Py_TYPE(interrupt), interrupt);
    Py_DECREF(interrupt);
    return -1;
}

/* Ends observation after a handler raised.  0: the error is kept in tracer->error and the program
 * goes on. -1: KeyboardInterrupt, SystemExit and their like, raised again into the program.  A tracer
 * that confines goes on observing then: the program's own handlers are to be stopped, too. */
static int
fail(Tracer *tracer)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(value, traceback);
    }
    Py_XSETREF(tracer->error, Py_NewRef(value));
    bool stops = !PyErr_GivenExceptionMatches(type, PyExc_Exception);
    int result = stops && tracer->confines ? 0 : mj_events_detach(tracer);
    if (result == 0 && stops) {
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    Py_DECREF(type);
    Py_DECREF(value);
    Py_XDECREF(traceback);
    return result;
}

/* ---- reading the value stack ---- */

static inline PyObject *
value_ref(PyObject *value)
{
    return Py_NewRef(value == NULL ? mj_null : value);
}

static PyObject *
pack(PyObject *const *values, Py_ssize_t count)
{
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple != NULL && i < count; i++) {
        PyTuple_SET_ITEM(tuple, i, value_ref(values[i]));
    }
    return tuple;
}

/* One more value at the end of those of the stack; steals nothing. */
static PyObject *
pack_and(PyObject *const *values, Py_ssize_t count, PyObject *last)
{
    PyObject *tuple = PyTuple_New(count + 1);
    for (Py_ssize_t i = 0; tuple != NULL && i < count; i++) {
        PyTuple_SET_ITEM(tuple, i, value_ref(values[i]));
    }
    if (tuple != NULL) {
        PyTuple_SET_ITEM(tuple, count, value_ref(last));
    }
    return tuple;
}

/* (callable, self or NULL, arguments...).  A bound method is taken apart, as PRECALL does on 3.11,
 * so that all versions report the same function; `self` of the call itself then becomes the first
 * argument. */
static PyObject *
pack_call(PyObject *callable, PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *shifted = NULL;
    if (callable != NULL && Py_IS_TYPE(callable, &PyMethod_Type)) {
        shifted = self;
        self = PyMethod_GET_SELF(callable);
        callable = PyMethod_GET_FUNCTION(callable);
    }
    Py_ssize_t extra = shifted != NULL ? 3 : 2;
    PyObject *tuple = PyTuple_New(extra + nargs);
    if (tuple == NULL) {
        return NULL;
    }
    PyTuple_SET_ITEM(tuple, 0, value_ref(callable));
    PyTuple_SET_ITEM(tuple, 1, value_ref(self));
    if (shifted != NULL) {
        PyTuple_SET_ITEM(tuple, 2, Py_NewRef(shifted));
    }
    for (Py_ssize_t i = 0; i < nargs; i++) {
        PyTuple_SET_ITEM(tuple, extra + i, value_ref(args[i]));
    }
    return tuple;
}

/* `with` leaves by an exception: exit(type, exception, traceback). */
static PyObject *
pack_with_exit(PyObject *exit, PyObject *exception)
{
    PyObject *traceback = PyException_GetTraceback(exception);
    PyObject *args[3] = {(PyObject *)Py_TYPE(exception), exception,
                         traceback == NULL ? Py_None : traceback};
    PyObject *tuple = pack_call(exit, NULL, args, 3);
    Py_XDECREF(traceback);
    return tuple;
}

static PyObject *
pack_slice(PyObject *const *values, Py_ssize_t count)
{
    PyObject *slice = PySlice_New(values[count - 2], values[count - 1], NULL);
    if (slice == NULL) {
        return NULL;
    }
    PyObject *tuple = pack_and(values, count - 2, slice);
    Py_DECREF(slice);
    return tuple;
}

static PyObject *
pack_fill(PyObject *const *values, Py_ssize_t count, Py_ssize_t added)
{
    PyObject *tuple = PyTuple_New(added + 1);
    for (Py_ssize_t i = 0; tuple != NULL && i <= added; i++) {
        PyTuple_SET_ITEM(tuple, i, value_ref(values[i == 0 ? 0 : count - added + i - 1]));
    }
    return tuple;
}

static PyObject *
pack_inputs(mj_frame *frame, const mj_unit *unit, PyObject *const *values)
{
    Py_ssize_t count = unit->ninputs;
    switch (unit->mode & 0x0F) {
    case INPUT_CELL:
        return pack_and(values, count, frame->localsplus[unit->operand]);
    case INPUT_CALL:
        return values[0] == NULL ? pack_call(values[1], NULL, values + 2, count - 2)
                                 : pack_call(values[0], values[1], values + 2, count - 2);
    case INPUT_CALL13:
        return pack_call(values[0], values[1], values + 2, count - 2);
    case INPUT_CALL_KW13:
        return pack_call(values[0], values[1], values + 2, count - 3);
    case INPUT_CALL_EX:
    case INPUT_CALL_EX13: {
        PyObject *callable = values[(unit->mode & 0x0F) == INPUT_CALL_EX ? 1 : 0];
        PyObject *items[3] = {callable, values[2], count > 3 ? values[3] : NULL};
        return pack(items, 3);
    }
    case INPUT_WITH_EXIT:
        return pack_with_exit(values[0], values[count - 1]);
    case INPUT_NAMESPACE:
        return pack_and(values, count, frame->f_locals);
    case INPUT_NONE_TEST:
        return pack_and(values, count, Py_None);
    case INPUT_SLICE:
        return pack_slice(values, count);
    case INPUT_BELOW_TOP:
        return pack(values, count - 1);
    case INPUT_FILL:
        return pack_fill(values, count, (Py_ssize_t)unit->operand);
    default:
        return pack(values, count);
    }
}

static bool
all_trivial(const Tracer *tracer, PyObject *const *values, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (values[i] != NULL && !mj_trivial_contains(tracer, Py_TYPE(values[i]))) {
            return false;
        }
    }
    return true;
}

/* Whether one may be a watched object: the table goes by hash alone, and may say so of others. */
static bool
any_watched(const Tracer *tracer, PyObject *const *values, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; tracer->watches && i < count; i++) {
        if (values[i] != NULL && tracer->watched[mj_hash_pointer(values[i]) & (MJ_WATCHED - 1)]) {
            return true;
        }
    }
    return false;
}

/* The handler that has to look at an instruction with these inputs, borrowed, or NULL.  That of HOLD
 * looks at watched objects also where their kind has no handler of its own. */
static PyObject *
handler_of(const Tracer *tracer, const mj_unit *unit, PyObject *const *values)
{
    int kind = unit->kind & ~MJ_FILTER;
    PyObject *handler = tracer->handlers[kind];
    bool filtered = (unit->kind & MJ_FILTER) && all_trivial(tracer, values, unit->ninputs);
    if (handler != NULL && !filtered && kind != MJ_HOLD) {
        return handler;
    }
    if (!any_watched(tracer, values, unit->ninputs)) {
        return NULL;
    }
    return handler != NULL ? handler : tracer->handlers[MJ_HOLD];
}

static PyObject *
pack_posts(const mj_unit *unit, int here, PyObject *const *top)
{
    Py_ssize_t count = unit->nposts;
    switch (unit->mode & 0xF0) {
    case POST_METHOD13: {
        PyObject *method = top[-2], *self = top[-1];
        PyObject *items[2] = {self == NULL ? NULL : method, self == NULL ? method : self};
        return pack(items, 2);
    }
    case POST_DROP_NULL:
        return pack(top - count - 1, count);
    case POST_ITERATION: {
        PyObject *ended = NULL;
        return (uint32_t)here == unit->next ? pack(top - count, count) : pack(&ended, 1);
    }
    default:
        return pack(top - count, count);
    }
}

/* ---- instructions ---- */

/* Calls the post handler that the frame's previous instruction left.  It is dropped instead where
 * that instruction did not complete: then execution goes on at an exception handler, which no
 * instruction falls through or jumps to. */
static int
deliver_pending(Tracer *tracer, mj_entry *entry, int here, PyObject *const *top)
{
    const mj_unit *unit = entry->pending_unit;
    PyObject *post = entry->pending;
    entry->pending = NULL;
    bool completed = (uint32_t)here == unit->next ||
                     ((unit->mode & 0xF0) == POST_ITERATION && (uint32_t)here == unit->operand);
    if (!completed) {
        Py_DECREF(post);
        return 0;
    }
    tracer->handling = entry->frame;
    PyObject *values = pack_posts(unit, here, top);
    PyObject *result = values == NULL ? NULL : PyObject_CallOneArg(post, values);
    tracer->handling = NULL;
    Py_XDECREF(values);
    Py_DECREF(post);
    if (result == NULL) {
        return fail(tracer);
    }
    Py_DECREF(result);
    return 0;
}

/* What a handler returned: None, OPAQUE, a post handler, or (OPAQUE, post handler).  Steals result.
 */
static void
take_result(mj_entry *entry, const mj_unit *unit, PyObject *result)
{
    PyObject *post = result;
    if (result == mj_opaque) {
        entry->opaque = true;
        post = Py_None;
    }
    else if (PyTuple_CheckExact(result) && PyTuple_GET_SIZE(result) == 2 &&
             PyTuple_GET_ITEM(result, 0) == mj_opaque) {
        entry->opaque = true;
        post = PyTuple_GET_ITEM(result, 1);
    }
    if (post != Py_None) {
        entry->pending = Py_NewRef(post);
        entry->pending_unit = unit;
    }
    Py_DECREF(result);
}

static int
call_handler(Tracer *tracer, mj_entry *entry, mj_frame *frame, const mj_unit *unit,
             PyObject *const *top)
{
    PyObject *const *values = top - unit->ninputs;
    PyObject *handler = handler_of(tracer, unit, values);
    if (handler == NULL) {
        return 0;
    }
    tracer->n_handled++;
    tracer->handling = frame;
    PyObject *inputs = pack_inputs(frame, unit, values);
    PyObject *offset =
        inputs == NULL ? NULL : PyLong_FromLong((long)unit->home * (long)sizeof(_Py_CODEUNIT));
    PyObject *result = NULL;
    if (offset != NULL) {
        PyObject *args[4] = {NULL, entry->state, offset, inputs};
        result = PyObject_Vectorcall(handler, args + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    }
    tracer->handling = NULL;
    Py_XDECREF(offset);
    Py_XDECREF(inputs);
    if (result == NULL) {
        return fail(tracer);
    }
    if (!tracer->attached) {
        Py_DECREF(result);
        return 0;
    }
    take_result(entry, unit, result);
    return 0;
}

/* Calls what at_next() left: wake(offset).  It may call at_next() again. */
static int
deliver_wake(Tracer *tracer, mj_entry *entry, int home)
{
    PyObject *wake = entry->wake;
    entry->wake = NULL;
    tracer->handling = entry->frame;
    PyObject *offset = PyLong_FromLong((long)home * (long)sizeof(_Py_CODEUNIT));
    PyObject *result = offset == NULL ? NULL : PyObject_CallOneArg(wake, offset);
    tracer->handling = NULL;
    Py_XDECREF(offset);
    Py_DECREF(wake);
    if (result == NULL) {
        return fail(tracer);
    }
    Py_DECREF(result);
    return 0;
}

int
mj_on_instruction(Tracer *tracer, mj_frame *frame, int here)
{
    mj_entry *entry = tracer->depth > 0 ? &tracer->entries[tracer->depth - 1] : NULL;
    if (entry == NULL || entry->frame != frame) {
        entry = mj_entry_find(tracer, frame);
        if (entry == NULL) {
            return 0;
        }
        mj_entries_drop_above(tracer, entry - tracer->entries + 1);
    }
    if (entry->state == NULL || here >= entry->code->n_units) {
        return 0;
    }
    const mj_unit *unit = &entry->code->units[here];
    tracer->n_instructions++;
    entry->opaque = false;
    if (__builtin_expect(entry->wake != NULL, 0)) {
        if (deliver_wake(tracer, entry, unit->kind == 0 ? here : (int)unit->home) < 0) {
            return -1;
        }
        if (!tracer->attached || tracer->paused > 0 || entry->wake != NULL) {
            return 0; /* given up, or asked to wait for the end of this instruction, too */
        }
    }
    if (unit->kind == 0 && entry->pending == NULL) {
        return unit->mode == MJ_QUIET;
    }
    if (unit->depth == MJ_UNREACHABLE) {
        PyErr_Format(PyExc_SystemError, "%U, unit %d: executed, but no stack depth is known for it",
                     entry->code->code->co_qualname, here);
        return fail(tracer);
    }
    PyObject *const *top = mj_frame_stack_base(frame) + unit->depth;
    if (entry->pending != NULL) {
        if (deliver_pending(tracer, entry, here, top) < 0) {
            return -1;
        }
        if (!tracer->attached) {
            return 0;
        }
    }
    return unit->kind == 0 ? 0 : call_handler(tracer, entry, frame, unit, top);
}

/* The depth of the value stack of the frame whose event is being handled; -1 for any other: while a
 * frame executes an instruction its stack must not be read. */
int
mj_handled_depth(mj_frame *frame)
{
    Tracer *tracer = mj_active_tracer;
    if (tracer == NULL || tracer->handling != frame) {
        return -1;
    }
    mj_entry *entry = mj_entry_find(tracer, frame);
    return entry == NULL ? -1 : entry->code->units[mj_frame_unit(frame)].depth;
}

/* ---- frames ---- */

static PyObject *
ask_on_frame(Tracer *tracer, mj_frame *frame, mj_code *code)
{
    int count = code->code->co_nlocalsplus;
    PyObject *locals = PyList_New(count);
    if (locals == NULL) {
        return NULL;
    }
    for (int i = 0; i < count; i++) {
        PyList_SET_ITEM(locals, i, value_ref(frame->localsplus[i]));
    }
    PyObject *args[6] = {
        NULL,  mj_frame_func(frame), (PyObject *)code->code, frame->f_globals, frame->f_builtins,
        locals};
    PyObject *verdict =
        PyObject_Vectorcall(tracer->on_frame, args + 1, 5 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_DECREF(locals);
    return verdict;
}

static int
begin(Tracer *tracer, mj_frame *frame, mj_code *code, PyObject *state)
{
    if (state != NULL && mj_code_load_plan(tracer, code) < 0) {
        return fail(tracer);
    }
    mj_entry *entry = mj_entry_push(tracer, frame, code, state);
    if (entry == NULL || mj_events_observe(tracer, entry, frame) < 0) {
        return fail(tracer);
    }
    return 0;
}

/* A generator that was suspended goes on: its state comes back and nobody is asked. */
static int
continue_suspended(Tracer *tracer, mj_frame *frame, mj_suspended *item)
{
    if (item->ignored) {
        return 0;
    }
    mj_entry *entry = mj_entry_push(tracer, frame, item->code, item->state);
    if (entry == NULL) {
        return fail(tracer);
    }
    entry->pending = Py_XNewRef(item->pending);
    entry->pending_unit = item->pending_unit;
    mj_suspended_remove(tracer, item);
    return mj_events_observe(tracer, entry, frame) < 0 ? fail(tracer) : 0;
}

/* `first`: execution starts; otherwise a generator is resumed. */
int
mj_on_entry(Tracer *tracer, mj_frame *frame, bool first)
{
    mj_entry *stale = mj_entry_find(tracer, frame);
    if (stale != NULL) {
        mj_entries_drop_above(tracer, stale - tracer->entries);
    }
    bool generator = mj_frame_is_generator(frame);
    if (generator && tracer->n_suspended > 0) {
        mj_suspended *item = mj_suspended_find(tracer, frame, first);
        if (item != NULL) {
            return continue_suspended(tracer, frame, item);
        }
    }
    if (tracer->depth > 0 && tracer->entries[tracer->depth - 1].opaque) {
        return 0;
    }
    mj_code *code = mj_code_find(tracer, mj_frame_code(frame));
    if (code == NULL) {
        return fail(tracer);
    }
    if (code->skip_always) {
        return begin(tracer, frame, code, NULL);
    }
    tracer->n_frames++;
    tracer->resuming = !first;
    PyObject *verdict = ask_on_frame(tracer, frame, code);
    tracer->resuming = false;
    if (verdict == NULL) {
        return fail(tracer);
    }
    int result = 0;
    if (!tracer->attached) {
        /* the handler stopped the tracer */
    }
    else if (verdict == Py_False) {
        result = generator && mj_suspend(tracer, NULL, true, frame) < 0 ? fail(tracer) : 0;
    }
    else if (verdict == Py_None || verdict == mj_skip_always) {
        code->skip_always = verdict == mj_skip_always;
        result = begin(tracer, frame, code, NULL);
    }
    else {
        result = begin(tracer, frame, code, verdict);
    }
    Py_DECREF(verdict);
    return result;
}

/* The entry of a frame that leaves, on top of the stack; NULL for a frame without one. */
static mj_entry *
entry_on_top(Tracer *tracer, mj_frame *frame)
{
    mj_entry *entry = mj_entry_find(tracer, frame);
    if (entry != NULL) {
        mj_entries_drop_above(tracer, entry - tracer->entries + 1);
        mj_events_release(tracer, entry, frame);
    }
    return entry;
}

int
mj_on_exit(Tracer *tracer, mj_frame *frame, PyObject *value)
{
    mj_entry *entry = entry_on_top(tracer, frame);
    if (entry == NULL) {
        return 0;
    }
    PyObject *state = Py_XNewRef(entry->state);
    mj_entry_pop(tracer);
    if (state == NULL) {
        return 0;
    }
    PyObject *args[3] = {NULL, state, value == NULL ? mj_null : value};
    PyObject *result =
        PyObject_Vectorcall(tracer->on_exit, args + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_DECREF(state);
    if (result == NULL) {
        return fail(tracer);
    }
    Py_DECREF(result);
    return 0;
}

int
mj_on_yield(Tracer *tracer, mj_frame *frame)
{
    mj_entry *entry = entry_on_top(tracer, frame);
    if (entry == NULL) {
        return 0;
    }
    if (mj_suspend(tracer, entry, false, frame) < 0) {
        return fail(tracer);
    }
    mj_entry_pop(tracer);
    return 0;
}
