/* Shared header of the extension module magjit._C.
 *
 * Every C file includes this header first; it is the only place that knows how the layout of interpreter frames
 * differs between CPython 3.11, 3.12 and 3.13.  No torch headers anywhere: the extension is built without torch.
 */
#ifndef MAGJIT_H
#define MAGJIT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>

#include <stdbool.h>
#include <stdint.h>

#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030E0000
#error "magjit._C supports CPython 3.11, 3.12 and 3.13"
#endif

#define MJ_PY312 (PY_VERSION_HEX >= 0x030C0000)
#define MJ_PY313 (PY_VERSION_HEX >= 0x030D0000)

/* Each C file exports one function that adds what it offers to the module; 0, or -1 with an exception set. */
int mj_init_tracer(PyObject *module);
int mj_init_guard(PyObject *module);
int mj_init_dispatch(PyObject *module);
int mj_init_hook(PyObject *module);
int mj_init_frames(PyObject *module);

/* Singletons (immortal for the life of the process), created by mj_init_frames before any other file is
 * initialised: _C.NULL stands for an empty stack slot, _C.OPAQUE and _C.SKIP_ALWAYS are verdicts of handlers. */
extern PyObject *mj_null;
extern PyObject *mj_opaque;
extern PyObject *mj_skip_always;

/* ---- interpreter frames (defined in frames.c; the layout is not visible here) ---- */
typedef struct _PyInterpreterFrame mj_frame;

/* The innermost Python frame of the thread (complete frames only), or NULL. */
mj_frame *mj_frame_current(PyThreadState *tstate);
/* The next complete Python frame outwards, or NULL. */
mj_frame *mj_frame_previous(mj_frame *frame);
mj_frame *mj_frame_of(PyFrameObject *frame);
PyCodeObject *mj_frame_code(mj_frame *frame);    /* borrowed */
PyObject *mj_frame_func(mj_frame *frame);        /* borrowed */
PyObject *mj_frame_globals(mj_frame *frame);     /* borrowed */
PyObject *mj_frame_builtins(mj_frame *frame);    /* borrowed */
PyObject **mj_frame_localsplus(mj_frame *frame); /* locals, cells, free variables, then the value stack */
int mj_frame_lasti(mj_frame *frame);             /* code unit of the instruction being executed */
int mj_frame_stacktop(mj_frame *frame);          /* -1 where the interpreter keeps it in a register (3.12+) */

#endif /* MAGJIT_H */
