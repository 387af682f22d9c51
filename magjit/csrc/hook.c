/* The frame hook (PEP 523): marked code objects are served by their dispatchers, whoever calls
 * them.
 *
 *     hook(frame) = dispatcher(function, *locals that are arguments)   if the code is marked
 *                 | the next hook, or the interpreter's evaluator      if not, or if it gave NULL
 *
 * The hook costs every Python call of the process something, so it is installed only while a code
 * object is marked and the hook is enabled.  It goes before whatever hook is there
 * (torch._dynamo's) and calls that one next.  torch._dynamo installs and removes its own around
 * each compiled call:
 *
 * - it may come after us and call us; then we cannot leave the chain while it is active, and stay
 *   in it as a passage until a frame finds us first again;
 * - it may be next after us, and when it leaves, it puts back the evaluator that it once found, and
 *   us aside; the next mark, or hook_install(), puts us back;
 * - it may be next after us and come again (from another thread): it calls us, and we call it.  A
 *   frame that comes back to us from the next hook shows this, and from then on we leave that one
 *   out: it is before us.
 */
#include "frames.h"

#if MJ_PY312
#define request_index PyUnstable_Eval_RequestCodeExtraIndex
#define get_extra PyUnstable_Code_GetExtra
#define set_extra PyUnstable_Code_SetExtra
#else
#define request_index _PyEval_RequestCodeExtraIndex
#define get_extra _PyCode_GetExtra
#define set_extra _PyCode_SetExtra
#endif

/* Arguments of a marked function that are passed on from the C stack; functions with more are not
 * served. */
enum { MAX_ARGUMENTS = 254 };

/* As in Objects/codeobject.c, all three versions. */
typedef struct {
    Py_ssize_t size;
    void *extra[1];
} code_extra;

static struct {
    Py_ssize_t index;           /* of the mark among a code object's extras */
    _PyFrameEvalFunction next;  /* NULL: the interpreter's evaluator */
    _PyFrameEvalFunction later; /* what was next before `next` came between */
    bool enabled;
    bool entered;
    bool passage; /* another hook may still call us, but nothing is to be served */
    Py_ssize_t marked;
    unsigned long long served, evaluated;
} hook = {.index = -1, .enabled = true};

/* The frame that this thread has given to the next hook. */
static _Thread_local mj_frame *with_next;

static void update(void);

/* ---- marks: a weak reference to the dispatcher, whose callback removes the mark ---- */

static inline PyObject *
mark_of(PyCodeObject *code)
{
    code_extra *extra = (code_extra *)code->co_extra;
    return extra != NULL && extra->size > hook.index ? extra->extra[hook.index] : NULL;
}

static void
free_mark(void *mark)
{
    if (mark != NULL) {
        hook.marked--;
        Py_DECREF((PyObject *)mark);
    }
}

/* Setting the extra calls free_mark for the one before. */
static int
remove_mark(PyObject *code)
{
    if (mark_of((PyCodeObject *)code) != NULL && set_extra(code, hook.index, NULL) < 0) {
        return -1;
    }
    update();
    return 0;
}

static PyObject *
dispatcher_died(PyObject *code, PyObject *reference)
{
    if (mark_of((PyCodeObject *)code) == reference && remove_mark(code) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef died_def = {"dispatcher_died", dispatcher_died, METH_O, NULL};

/* ---- frames that are not evaluated ---- */

#if MJ_PY312
/* What _PyThreadState_PopFrame does, which is not exported by every build. */
static void
pop_frame(PyThreadState *tstate, mj_frame *frame)
{
    PyObject **base = (PyObject **)frame;
    _PyStackChunk *chunk = tstate->datastack_chunk;
    if (base != &chunk->data[0]) {
        tstate->datastack_top = base;
        return;
    }
    _PyStackChunk *previous = chunk->previous;
    tstate->datastack_top = &previous->data[previous->top];
    tstate->datastack_chunk = previous;
    PyObjectArenaAllocator arena;
    PyObject_GetArenaAllocator(&arena);
    arena.free(arena.ctx, chunk, chunk->size);
    tstate->datastack_limit = (PyObject **)((char *)previous + previous->size);
}

/* Since 3.12 the evaluator, not its caller, clears the frame and takes it off the stack.  This one
 * has not begun: no value stack, and no frame object. */
static void
discard_frame(PyThreadState *tstate, mj_frame *frame)
{
    PyObject *code = (PyObject *)mj_frame_code(frame);
    int n = frame->stacktop;
    frame->stacktop = 0;
    for (int i = 0; i < n; i++) {
        Py_XDECREF(frame->localsplus[i]);
    }
    Py_XDECREF(frame->f_locals);
    Py_DECREF(frame->f_funcobj);
    Py_DECREF(code);
    pop_frame(tstate, frame);
}
#else
/* The caller does it. */
static void
discard_frame(PyThreadState *tstate, mj_frame *frame)
{
}
#endif

/* ---- the hook ---- */

static inline PyObject *
evaluate(PyThreadState *tstate, mj_frame *frame, int throwing)
{
    if (hook.next == NULL) {
        return _PyEval_EvalFrameDefault(tstate, frame, throwing);
    }
    mj_frame *outer = with_next;
    with_next = frame;
    PyObject *result = hook.next(tstate, frame, throwing);
    with_next = outer;
    return result;
}

static int
argument_count(PyCodeObject *code)
{
    return code->co_argcount + code->co_kwonlyargcount + !!(code->co_flags & CO_VARARGS) +
           !!(code->co_flags & CO_VARKEYWORDS);
}

/* Only a function's frame that is about to begin can be replaced by its result. */
static bool
can_serve(mj_frame *frame, PyCodeObject *code, int throwing)
{
    int function = CO_OPTIMIZED | CO_NEWLOCALS;
    int suspends = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR;
    return !throwing && frame->owner == FRAME_OWNED_BY_THREAD && frame->frame_obj == NULL &&
           (code->co_flags & function) == function && !(code->co_flags & suspends) &&
           argument_count(code) <= MAX_ARGUMENTS;
}

static PyObject *
serve(PyThreadState *tstate, mj_frame *frame, PyCodeObject *code, PyObject *dispatcher)
{
    int n = argument_count(code);
    PyObject *values[MAX_ARGUMENTS + 2];
    values[1] = mj_frame_func(frame);
    memcpy(values + 2, frame->localsplus, (size_t)n * sizeof(PyObject *));
    Py_INCREF(dispatcher);
    PyObject *result = PyObject_Vectorcall(dispatcher, values + 1,
                                           (size_t)(n + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_DECREF(dispatcher);
    if (result == mj_null) {
        Py_DECREF(result);
        hook.evaluated++;
        return evaluate(tstate, frame, 0);
    }
    hook.served++;
    discard_frame(tstate, frame);
    return result;
}

static PyObject *
frame_hook(PyThreadState *tstate, mj_frame *frame, int throwing)
{
    PyCodeObject *code = mj_frame_code(frame);
    PyObject *mark = mark_of(code);
    if (__builtin_expect(hook.passage, 0)) {
        update();
    }
    if (__builtin_expect(frame == with_next, 0)) {
        hook.next = hook.later;
        hook.later = NULL;
        return (hook.next != NULL ? hook.next : _PyEval_EvalFrameDefault)(tstate, frame, throwing);
    }
    if (mark == NULL || !hook.enabled || !can_serve(frame, code, throwing)) {
        return evaluate(tstate, frame, throwing);
    }
    PyObject *dispatcher = ((PyWeakReference *)mark)->wr_object;
    if (dispatcher == Py_None || Py_REFCNT(dispatcher) == 0) {
        return evaluate(tstate, frame, throwing);
    }
    return serve(tstate, frame, code, dispatcher);
}

/* ---- being in the chain, or not ---- */

static bool
is_first(void)
{
    return _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) == frame_hook;
}

static void
set_first(_PyFrameEvalFunction function)
{
    _PyInterpreterState_SetEvalFrameFunc(PyInterpreterState_Get(), function);
}

static void
enter_chain(void)
{
    hook.passage = false;
    hook.entered = true;
    if (is_first()) {
        return;
    }
    _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get());
    if (now != hook.next) {
        hook.later = hook.next;
    }
    hook.next = now == _PyEval_EvalFrameDefault ? NULL : now;
    if (hook.next == NULL) {
        hook.later = NULL; /* nobody is in the chain */
    }
    set_first(frame_hook);
}

static void
leave_chain(void)
{
    if (!is_first()) {
        hook.passage = true;
        return;
    }
    set_first(hook.next != NULL ? hook.next : _PyEval_EvalFrameDefault);
    hook.next = hook.later = NULL;
    hook.passage = hook.entered = false;
}

/* After every change of what is wanted, and from the hook itself while it is a passage. */
static void
update(void)
{
    if (hook.enabled && hook.marked > 0) {
        enter_chain();
    }
    else if (hook.entered) {
        leave_chain();
    }
}

/* ---- from Python ---- */

static PyObject *
hook_install(PyObject *module, PyObject *unused)
{
    hook.enabled = true;
    update();
    Py_RETURN_NONE;
}

static PyObject *
hook_uninstall(PyObject *module, PyObject *unused)
{
    hook.enabled = false;
    update();
    Py_RETURN_NONE;
}

static PyObject *
hook_mark(PyObject *module, PyObject *args)
{
    PyObject *code, *dispatcher;
    if (!PyArg_ParseTuple(args, "O!O:hook_mark", &PyCode_Type, &code, &dispatcher)) {
        return NULL;
    }
    if (!PyCallable_Check(dispatcher)) {
        PyErr_SetString(PyExc_TypeError, "dispatcher: expected a callable");
        return NULL;
    }
    PyObject *callback = PyCFunction_New(&died_def, code);
    PyObject *mark = callback != NULL ? PyWeakref_NewRef(dispatcher, callback) : NULL;
    Py_XDECREF(callback);
    if (mark == NULL) {
        return NULL;
    }
    hook.marked++;
    if (set_extra(code, hook.index, mark) < 0) {
        hook.marked--;
        Py_DECREF(mark);
        return NULL;
    }
    update();
    Py_RETURN_NONE;
}

static PyObject *
hook_unmark(PyObject *module, PyObject *code)
{
    if (!PyCode_Check(code)) {
        PyErr_Format(PyExc_TypeError, "expected a code object, not %.100s", Py_TYPE(code)->tp_name);
        return NULL;
    }
    if (remove_mark(code) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
hook_state(PyObject *module, PyObject *unused)
{
    return Py_BuildValue("{s:O,s:n,s:O,s:O,s:K,s:K}", "enabled", hook.enabled ? Py_True : Py_False,
                         "marked", hook.marked, "first", is_first() ? Py_True : Py_False, "chained",
                         hook.next != NULL ? Py_True : Py_False, "served", hook.served, "evaluated",
                         hook.evaluated);
}

static PyMethodDef methods[] = {
    {"hook_install", hook_install, METH_NOARGS,
     "hook_install(): serve marked code from now on (the default); also puts the hook back first"},
    {"hook_uninstall", hook_uninstall, METH_NOARGS,
     "hook_uninstall(): evaluate marked code as usual until hook_install()"},
    {"hook_mark", hook_mark, METH_VARARGS,
     "hook_mark(code, dispatcher): calls of this code become dispatcher(function, *arguments);\n"
     "arguments are the function's local variables that are arguments, in order, *args as a tuple\n"
     "and **kwargs as a dict.  If it returns _C.NULL, the frame is evaluated as usual.  Frames of\n"
     "generators and coroutines are never served.  The dispatcher is referred to weakly."},
    {"hook_unmark", hook_unmark, METH_O, "hook_unmark(code): no effect on code without a mark"},
    {"hook_state", hook_state, METH_NOARGS,
     "hook_state(): enabled, marked (number of code objects), first (whether the hook is the\n"
     "interpreter's), chained (whether it calls another), served and evaluated (numbers of "
     "frames)"},
    {NULL},
};

int
mj_init_hook(PyObject *module)
{
    if (hook.index < 0) {
        hook.index = request_index(free_mark);
        if (hook.index < 0) {
            PyErr_SetString(PyExc_RuntimeError, "too many users of the code objects' extra slots");
            return -1;
        }
    }
    return PyModule_AddFunctions(module, methods);
}
