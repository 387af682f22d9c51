/* Shared header of the extension module magjit._C.
 *
 * Every C file includes this header first.  No torch headers anywhere: the extension is built
 * without torch.
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

#ifdef Py_GIL_DISABLED
#error "magjit._C needs an interpreter with the GIL"
#endif

#define MJ_PY312 (PY_VERSION_HEX >= 0x030C0000)
#define MJ_PY313 (PY_VERSION_HEX >= 0x030D0000)

/* Each C file exports one function that adds what it offers to the module; 0, or -1 with an
 * exception set. */
int mj_init_frames(PyObject *module);
int mj_init_tracer(PyObject *module);
int mj_init_guard(PyObject *module);
int mj_init_dispatch(PyObject *module);
int mj_init_shell(PyObject *module);
int mj_init_hook(PyObject *module);
int mj_init_thunk(PyObject *module);
int mj_init_step(PyObject *module);
int mj_init_reading(PyObject *module);
int mj_init_garbage(PyObject *module);

/* Singletons, alive as long as the process, created by mj_init_frames before any other file is
 * initialised: _C.NULL stands for an empty stack slot, _C.OPAQUE and _C.SKIP_ALWAYS are verdicts of
 * handlers. */
extern PyObject *mj_null;
extern PyObject *mj_opaque;
extern PyObject *mj_skip_always;

#endif /* MAGJIT_H */
