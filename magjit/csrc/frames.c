/* The module's singletons, and what Python code may read and write of an interpreter frame. */
#include "frames.h"

PyObject *mj_null;
PyObject *mj_opaque;
PyObject *mj_skip_always;

/* ---- readers and writer ---- */

/* The value stack of a frame as (base, depth).  The interpreter stores the stack pointer of any
 * suspended generator and, on 3.11, of a frame whose trace function runs; the tracer knows the
 * depth in the frame whose event it reports.  Otherwise the caller must give it. */
static int
locate_stack(PyObject *object, Py_ssize_t given, PyObject ***base, Py_ssize_t *depth)
{
    if (!PyFrame_Check(object)) {
        PyErr_Format(PyExc_TypeError, "expected a frame, not %.100s", Py_TYPE(object)->tp_name);
        return -1;
    }
    mj_frame *frame = ((PyFrameObject *)object)->f_frame;
    PyCodeObject *code = mj_frame_code(frame);
    *base = mj_frame_stack_base(frame);
    *depth = given;
    if (given < 0) {
        *depth = frame->stacktop - code->co_nlocalsplus;
    }
    if (*depth < 0) {
        *depth = mj_handled_depth(frame);
    }
    if (*depth < 0 || *depth > code->co_stacksize) {
        PyErr_SetString(PyExc_ValueError,
                        given >= 0
                            ? "depth does not fit the frame's code"
                            : "the interpreter does not show this frame's stack depth: give it");
        return -1;
    }
    return 0;
}

static PyObject *
values_as_list(PyObject **values, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyList_SET_ITEM(list, i, Py_NewRef(values[i] == NULL ? mj_null : values[i]));
    }
    return list;
}

PyDoc_STRVAR(
    stack_doc,
    "stack(frame, depth=-1) -> list\n\n"
    "The value stack of a frame, bottom first, empty slots as NULL.  depth is the static depth at\n"
    "the frame's instruction, not needed for suspended generators and for the frame whose event a\n"
    "handler of a Tracer looks at.  Raises ValueError where it is not known.  Of a frame in the\n"
    "midst of a call only what lies below the call's operands may be read, and of one that\n"
    "waits for C code all that was there when its instruction began.");

static PyObject *
frame_stack(PyObject *self, PyObject *args)
{
    PyObject *frame, **base;
    Py_ssize_t given = -1, depth;
    if (!PyArg_ParseTuple(args, "O|n:stack", &frame, &given) ||
        locate_stack(frame, given, &base, &depth) < 0) {
        return NULL;
    }
    return values_as_list(base, depth);
}

PyDoc_STRVAR(
    localsplus_doc,
    "localsplus(frame) -> list\n\n"
    "The locals, cells and free variables of a frame in the order of its code's fast locals;\n"
    "unbound ones as NULL, cells as cell objects.");

static PyObject *
frame_localsplus(PyObject *self, PyObject *object)
{
    if (!PyFrame_Check(object)) {
        return PyErr_Format(PyExc_TypeError, "expected a frame, not %.100s",
                            Py_TYPE(object)->tp_name);
    }
    mj_frame *frame = ((PyFrameObject *)object)->f_frame;
    return values_as_list(frame->localsplus, mj_frame_code(frame)->co_nlocalsplus);
}

PyDoc_STRVAR(function_doc,
             "function(frame) -> object\n\n"
             "The function that a frame executes.");

static PyObject *
frame_function(PyObject *self, PyObject *object)
{
    if (!PyFrame_Check(object)) {
        return PyErr_Format(PyExc_TypeError, "expected a frame, not %.100s",
                            Py_TYPE(object)->tp_name);
    }
    PyObject *function = mj_frame_func(((PyFrameObject *)object)->f_frame);
    return Py_NewRef(function == NULL ? Py_None : function);
}

PyDoc_STRVAR(
    replace_stack_doc,
    "replace_stack(frame, index, value, depth=-1)\n\n"
    "Puts value in place of the stack's item number index, counted from the top (0).  The frame\n"
    "must be suspended: inside an event of this frame, or a generator that is not running.");

static PyObject *
frame_replace_stack(PyObject *self, PyObject *args)
{
    PyObject *frame, *value, **base;
    Py_ssize_t index, given = -1, depth;
    if (!PyArg_ParseTuple(args, "OnO|n:replace_stack", &frame, &index, &value, &given) ||
        locate_stack(frame, given, &base, &depth) < 0) {
        return NULL;
    }
    if (index < 0 || index >= depth) {
        PyErr_Format(PyExc_IndexError, "stack index %zd, depth %zd", index, depth);
        return NULL;
    }
    PyObject **slot = &base[depth - 1 - index];
    PyObject *old = *slot;
    *slot = value == mj_null ? NULL : Py_NewRef(value);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(replace_local_doc,
             "replace_local(frame, index, value)\n\n"
             "Puts value in place of a frame's fast local number index, which has a value.  The\n"
             "frame must be suspended, or wait for a call to return.");

static PyObject *
frame_replace_local(PyObject *self, PyObject *args)
{
    PyObject *object, *value;
    Py_ssize_t index;
    if (!PyArg_ParseTuple(args, "O!nO:replace_local", &PyFrame_Type, &object, &index, &value)) {
        return NULL;
    }
    mj_frame *frame = ((PyFrameObject *)object)->f_frame;
    if (index < 0 || index >= mj_frame_code(frame)->co_nlocalsplus ||
        frame->localsplus[index] == NULL) {
        return PyErr_Format(PyExc_IndexError, "fast local %zd has no value", index);
    }
    Py_SETREF(frame->localsplus[index], Py_NewRef(value));
    Py_RETURN_NONE;
}

PyDoc_STRVAR(fresh_number_doc,
             "fresh_number(value) -> int, float or str\n\n"
             "An equal object that nothing else refers to, also of a small int or a text of one\n"
             "character, of which the interpreter otherwise keeps one.  Raises TypeError for other\n"
             "types and for the empty text.");

static PyObject *
fresh_text(PyObject *value)
{
    Py_ssize_t length = PyUnicode_GET_LENGTH(value);
    PyObject *fresh = PyUnicode_New(length, PyUnicode_MAX_CHAR_VALUE(value));
    if (fresh != NULL && PyUnicode_CopyCharacters(fresh, 0, value, 0, length) < 0) {
        Py_CLEAR(fresh);
    }
    return fresh;
}

static PyObject *
fresh_number(PyObject *self, PyObject *value)
{
    if (PyFloat_CheckExact(value)) {
        return PyFloat_FromDouble(PyFloat_AS_DOUBLE(value));
    }
    if (PyUnicode_CheckExact(value) && PyUnicode_GET_LENGTH(value) > 0) {
        return fresh_text(value);
    }
    if (!PyLong_CheckExact(value)) {
        return PyErr_Format(PyExc_TypeError, "expected an int, a float or a text, not %.100s",
                            Py_TYPE(value)->tp_name);
    }
    PyLongObject *number = (PyLongObject *)value;
#if MJ_PY312
    Py_ssize_t count = (Py_ssize_t)(number->long_value.lv_tag >> 3);
    PyLongObject *fresh = _PyLong_New(count);
    if (fresh != NULL) {
        fresh->long_value.lv_tag = number->long_value.lv_tag;
        memcpy(fresh->long_value.ob_digit, number->long_value.ob_digit,
               (size_t)(count == 0 ? 1 : count) * sizeof(digit));
    }
#else
    Py_ssize_t count = Py_SIZE(number) < 0 ? -Py_SIZE(number) : Py_SIZE(number);
    PyLongObject *fresh = _PyLong_New(count);
    if (fresh != NULL) {
        Py_SET_SIZE(fresh, Py_SIZE(number));
        memcpy(fresh->ob_digit, number->ob_digit, (size_t)count * sizeof(digit));
    }
#endif
    return (PyObject *)fresh;
}

static PyMethodDef methods[] = {
    {"fresh_number", fresh_number, METH_O, fresh_number_doc},
    {"stack", frame_stack, METH_VARARGS, stack_doc},
    {"localsplus", frame_localsplus, METH_O, localsplus_doc},
    {"function", frame_function, METH_O, function_doc},
    {"replace_stack", frame_replace_stack, METH_VARARGS, replace_stack_doc},
    {"replace_local", frame_replace_local, METH_VARARGS, replace_local_doc},
    {NULL, NULL, 0, NULL},
};

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
    if (mj_null == NULL || mj_opaque == NULL || mj_skip_always == NULL) {
        return -1;
    }
    return PyModule_AddFunctions(module, methods);
}
