/* Thunk(function, args): a callable that takes any arguments and calls function(*args).
 *
 * It stands in for the callee of a call that is made again (magjit.continuations).  No Python frame
 * of its own comes between the caller and the function.
 */
#include "magjit.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD vectorcallfunc vectorcall;
    PyObject *function, *args;
} thunk;

static PyObject *
thunk_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    thunk *t = (thunk *)self;
    PyObject *function = Py_NewRef(t->function), *given = Py_NewRef(t->args);
    PyObject *result = PyObject_Call(function, given, NULL);
    Py_DECREF(function);
    Py_DECREF(given);
    return result;
}

static PyObject *
thunk_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *function, *given;
    if (!PyArg_ParseTuple(args, "OO!:Thunk", &function, &PyTuple_Type, &given)) {
        return NULL;
    }
    thunk *t = (thunk *)type->tp_alloc(type, 0);
    if (t != NULL) {
        t->vectorcall = thunk_call;
        t->function = Py_NewRef(function);
        t->args = Py_NewRef(given);
    }
    return (PyObject *)t;
}

static int
thunk_traverse(PyObject *self, visitproc visit, void *arg)
{
    thunk *t = (thunk *)self;
    Py_VISIT(t->function);
    Py_VISIT(t->args);
    return 0;
}

static void
thunk_dealloc(PyObject *self)
{
    thunk *t = (thunk *)self;
    PyObject_GC_UnTrack(self);
    Py_XDECREF(t->function);
    Py_XDECREF(t->args);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef thunk_members[] = {
    {"function", T_OBJECT, offsetof(thunk, function), READONLY, "what is called"},
    {"args", T_OBJECT, offsetof(thunk, args), READONLY, "with what"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject thunk_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "magjit._C.Thunk",
    .tp_basicsize = sizeof(thunk),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "Thunk(function, args): takes any arguments and gives function(*args)",
    .tp_new = thunk_new,
    .tp_dealloc = thunk_dealloc,
    .tp_traverse = thunk_traverse,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(thunk, vectorcall),
    .tp_members = thunk_members,
};

int
mj_init_thunk(PyObject *module)
{
    return PyModule_AddType(module, &thunk_type);
}
