/* Compiled objects: calls of their classes go to a dispatcher, without a Python frame between.
 *
 * The class has a __call__ written in Python as well, for whoever looks it up: torch._dynamo, which
 * follows it, a subclass, or an explicit obj.__call__(...).
 */
#include "magjit.h"

static PyObject *dispatcher_name; /* interned: the attribute of the class that holds the dispatcher */

static PyObject *
shell_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *dispatcher = _PyType_Lookup(Py_TYPE(self), dispatcher_name);
    if (dispatcher == NULL) {
        PyErr_Format(PyExc_TypeError, "'%.100s' object has lost its dispatcher",
                     Py_TYPE(self)->tp_name);
        return NULL;
    }
    Py_INCREF(dispatcher);
    PyObject *result = PyObject_Call(dispatcher, args, kwargs);
    Py_DECREF(dispatcher);
    return result;
}

PyDoc_STRVAR(route_calls_doc,
             "route_calls(cls, /)\n--\n\n"
             "Calls of instances of exactly this class go to its attribute _magjit_dispatcher.");

static PyObject *
route_calls(PyObject *Py_UNUSED(module), PyObject *cls)
{
    if (!PyType_Check(cls) || !PyType_HasFeature((PyTypeObject *)cls, Py_TPFLAGS_HEAPTYPE)) {
        PyErr_SetString(PyExc_TypeError, "expected a class that is written in Python");
        return NULL;
    }
    if (_PyType_Lookup((PyTypeObject *)cls, dispatcher_name) == NULL) {
        PyErr_SetString(PyExc_TypeError, "the class has no dispatcher");
        return NULL;
    }
    ((PyTypeObject *)cls)->tp_call = shell_call;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"route_calls", route_calls, METH_O, route_calls_doc},
    {NULL, NULL, 0, NULL},
};

int
mj_init_shell(PyObject *module)
{
    dispatcher_name = PyUnicode_InternFromString("_magjit_dispatcher");
    return dispatcher_name == NULL ? -1 : PyModule_AddFunctions(module, functions);
}
