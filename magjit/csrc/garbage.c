/* Uncollected(): a context manager inside which the collector of garbage is off.
 *
 * Several threads may be inside at once, and each may leave first: the collector is on again when
 * the last one has left, if it was on when the first one came.  To ask for its state and to switch
 * it is one step for other threads and for signals, as it cannot be in Python code.
 */
#include "magjit.h"

static Py_ssize_t inside = 0;
static int was_on = 0;

typedef struct {
    PyObject_HEAD Py_ssize_t entered;
} uncollected;

static void
enter(void)
{
    int on = PyGC_Disable();
    if (inside++ == 0) {
        was_on = on;
    }
}

static void
leave(void)
{
    if (--inside == 0 && was_on) {
        PyGC_Enable();
    }
}

static PyObject *
uncollected_enter(PyObject *self, PyObject *unused)
{
    ((uncollected *)self)->entered++;
    enter();
    Py_RETURN_NONE;
}

static PyObject *
uncollected_exit(PyObject *self, PyObject *unused)
{
    uncollected *u = (uncollected *)self;
    if (u->entered == 0) {
        PyErr_SetString(PyExc_RuntimeError, "__exit__ without __enter__");
        return NULL;
    }
    u->entered--;
    leave();
    Py_RETURN_NONE;
}

static void
uncollected_dealloc(PyObject *self)
{
    for (uncollected *u = (uncollected *)self; u->entered > 0; u->entered--) {
        leave();
    }
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef uncollected_methods[] = {
    {"__enter__", uncollected_enter, METH_NOARGS, NULL},
    {"__exit__", uncollected_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject uncollected_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "magjit._C.Uncollected",
    .tp_basicsize = sizeof(uncollected),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Uncollected(): a context manager inside which no thread collects garbage",
    .tp_new = PyType_GenericNew,
    .tp_dealloc = uncollected_dealloc,
    .tp_methods = uncollected_methods,
};

int
mj_init_garbage(PyObject *module)
{
    return PyModule_AddType(module, &uncollected_type);
}
