/* Interpreter frames: the one place that knows how _PyInterpreterFrame differs between
 * CPython 3.11, 3.12 and 3.13. Inline, because the tracer reads frames at every instruction. */
#ifndef MAGJIT_FRAMES_H
#define MAGJIT_FRAMES_H

#include "magjit.h"

#define Py_BUILD_CORE 1
#include <internal/pycore_code.h>
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE

typedef struct _PyInterpreterFrame mj_frame;

static inline PyCodeObject *
mj_frame_code(const mj_frame *frame)
{
#if MJ_PY313
    return (PyCodeObject *)frame->f_executable;
#else
    return frame->f_code;
#endif
}

static inline PyObject *
mj_frame_func(const mj_frame *frame)
{
#if MJ_PY312
    return frame->f_funcobj;
#else
    return (PyObject *)frame->f_func;
#endif
}

/* The code unit of the instruction that is executed next, or that the frame is waiting in. */
static inline int
mj_frame_unit(const mj_frame *frame)
{
#if MJ_PY313
    return (int)(frame->instr_ptr - _PyCode_CODE(mj_frame_code(frame)));
#else
    return (int)(frame->prev_instr - _PyCode_CODE(mj_frame_code(frame)));
#endif
}

static inline bool
mj_frame_is_generator(const mj_frame *frame)
{
    return frame->owner == FRAME_OWNED_BY_GENERATOR;
}

static inline PyObject *
mj_frame_generator(mj_frame *frame)
{
    return (PyObject *)_PyFrame_GetGenerator(frame);
}

static inline PyObject **
mj_frame_stack_base(mj_frame *frame)
{
    return frame->localsplus + mj_frame_code(frame)->co_nlocalsplus;
}

/* The innermost Python frame of the thread, exactly as the interpreter has it. */
static inline mj_frame *
mj_frame_top(PyThreadState *tstate)
{
#if MJ_PY313
    return tstate->current_frame;
#else
    return tstate->cframe->current_frame;
#endif
}

/* Depth of the stack of the frame whose event a handler looks at, or -1 (tracer_core.c). */
int mj_handled_depth(mj_frame *frame);

#endif /* MAGJIT_FRAMES_H */
