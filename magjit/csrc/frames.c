/* Interpreter frames: the layout of _PyInterpreterFrame on CPython 3.11, 3.12 and 3.13, behind small functions,
 * and the readers and the writer of the value stack that Python code may use. */
#define Py_BUILD_CORE 1
#include "magjit.h"
#include <internal/pycore_code.h>
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE

PyObject *mj_null;
PyObject *mj_opaque;
PyObject *mj_skip_always;

/* ---- layout ---- */

static mj_frame *
complete(mj_frame *frame)
{
    while (frame != NULL) {
#if MJ_PY312
        bool usable = frame->owner != FRAME_OWNED_BY_CSTACK && !_PyFrame_IsIncomplete(frame);
#else
        bool usable = !_PyFrame_IsIncomplete(frame);
#endif
        if (usable) {
            return frame;
        }
        frame = frame->previous;
    }
    return NULL;
}

mj_frame *
mj_frame_current(PyThreadState *tstate)
{
#if MJ_PY313
    return complete(tstate->current_frame);
#else
    return complete(tstate->cframe->current_frame);
#endif
}

mj_frame *
mj_frame_previous(mj_frame *frame)
{
    return complete(frame->previous);
}

mj_frame *
mj_frame_of(PyFrameObject *frame)
{
    return frame->f_frame;
}

PyCodeObject *
mj_frame_code(mj_frame *frame)
{
#if MJ_PY313
    return (PyCodeObject *)frame->f_executable;
#else
    return frame->f_code;
#endif
}

PyObject *
mj_frame_func(mj_frame *frame)
{
#if MJ_PY312
    return frame->f_funcobj;
#else
    return (PyObject *)frame->f_func;
#endif
}

PyObject *
mj_frame_globals(mj_frame *frame)
{
    return frame->f_globals;
}

PyObject *
mj_frame_builtins(mj_frame *frame)
{
    return frame->f_builtins;
}

PyObject **
mj_frame_localsplus(mj_frame *frame)
{
    return frame->localsplus;
}

int
mj_frame_lasti(mj_frame *frame)
{
    return (int)_PyInterpreterFrame_LASTI(frame);
}

int
mj_frame_stacktop(mj_frame *frame)
{
    return frame->stacktop;
}

/* ---- singletons ---- */

typedef struct {
    PyObject_HEAD
    const char *name;
} Singleton;

static PyObject *
singleton_repr(PyObject *self)
{
    return PyUnicode_FromFormat("magjit._C.%s", ((Singleton *)self)->name);
}

static PyTypeObject singleton_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "magjit._C.Singleton",
    .tp_basicsize = sizeof(Singleton),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_repr = singleton_repr,
    .tp_doc = "A named marker, compared by identity.",
};

static PyObject *
add_singleton(PyObject *module, const char *name)
{
    Singleton *object = PyObject_New(Singleton, &singleton_type);
    if (object == NULL) {
        return NULL;
    }
    object->name = name;
    if (PyModule_AddObjectRef(module, name, (PyObject *)object) < 0) {
        Py_DECREF(object);
        return NULL;
    }
    return (PyObject *)object;
}

int
mj_init_frames(PyObject *module)
{
    if (PyType_Ready(&singleton_type) < 0) {
        return -1;
    }
    mj_null = add_singleton(module, "NULL");
    mj_opaque = add_singleton(module, "OPAQUE");
    mj_skip_always = add_singleton(module, "SKIP_ALWAYS");
    return mj_null == NULL || mj_opaque == NULL || mj_skip_always == NULL ? -1 : 0;
}
