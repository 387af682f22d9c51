/* Reads of tensors between two regions, served from a copy on the host where there is one.
 *
 *     reader(function, tensor, values, held, copy or None) = (number, copy or None)
 *                                                          | None    to be read as always
 *
 * The copy is of the data of its holder, a tensor that the frames hold.  It is given to the reader
 * as long as nothing ran since it was made that may write without a trace in a version, and each
 * region since then was handed the holder: a record that is pure leaves alone what is alive.
 */
#include "reading.h"

#include "guard_torch.h"

unsigned long long mj_effects;

static PyObject *reader, *functions; /* functions: a tuple */
static uint32_t device_types;        /* bit set of torch's numbers of them */

static PyObject *
set_reader(PyObject *module, PyObject *args)
{
    PyObject *new_reader, *new_functions;
    unsigned int types;
    if (!PyArg_ParseTuple(args, "OO!I:set_reader", &new_reader, &PyTuple_Type, &new_functions,
                          &types)) {
        return NULL;
    }
    Py_XSETREF(reader, Py_NewRef(new_reader));
    Py_XSETREF(functions, Py_NewRef(new_functions));
    device_types = types;
    Py_RETURN_NONE;
}

static bool
is_for_reader(PyObject *tensor)
{
    const torch_lib *lib = device_types != 0 ? mj_torch() : NULL;
    int32_t type;
    if (lib == NULL || (PyObject *)Py_TYPE(tensor) != lib->plain_types[0] ||
        mj_torch_impl(lib, tensor) == NULL ||
        lib->device_type(mj_torch_handle(lib, tensor), &type) != 0) {
        return false;
    }
    return type >= 0 && type < 32 && (device_types >> type & 1) != 0;
}

void
mj_read_clear(read_state *state)
{
    Py_CLEAR(state->copy);
    Py_CLEAR(state->holder);
}

static int
keep_copy(read_state *state, PyObject *copy)
{
    if (copy == state->copy) {
        return 0;
    }
    mj_read_clear(state);
    if (copy == Py_None) {
        return 0;
    }
    state->holder = PyObject_GetAttrString(copy, "holder");
    if (state->holder == NULL) {
        return -1;
    }
    state->copy = Py_NewRef(copy);
    state->effects = mj_effects;
    return 0;
}

int
mj_read(read_state *state, PyObject *function, PyObject *tensor, PyObject *values, Py_ssize_t held,
        PyObject **number)
{
    if (!is_for_reader(tensor)) {
        return 0;
    }
    if (state->copy != NULL && state->effects != mj_effects) {
        mj_read_clear(state);
    }
    PyObject *copy = state->copy != NULL ? state->copy : Py_None;
    PyObject *found =
        PyObject_CallFunction(reader, "OOOnO", function, tensor, values, held, copy);
    int status = found == NULL ? -1 : 0;
    if (found != NULL && found != Py_None) {
        PyObject *value, *now;
        status = -1;
        if (PyArg_ParseTuple(found, "OO", &value, &now) && keep_copy(state, now) == 0) {
            *number = Py_NewRef(value);
            status = 1;
        }
    }
    Py_XDECREF(found);
    return status;
}

bool
mj_reads(PyObject *function)
{
    for (Py_ssize_t i = 0; functions != NULL && i < PyTuple_GET_SIZE(functions); i++) {
        if (PyTuple_GET_ITEM(functions, i) == function) {
            return true;
        }
    }
    return false;
}

void
mj_read_keep(read_state *state, PyObject *const *values, Py_ssize_t n)
{
    if (state->holder == NULL) {
        return;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (values[i] == state->holder) {
            return;
        }
    }
    mj_read_clear(state);
}

/* ---- what runs no Python code ---- */

bool
mj_is_plain(PyObject *object)
{
    return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) ||
           PyFloat_CheckExact(object) || PyUnicode_CheckExact(object) ||
           PyTuple_CheckExact(object) || PyList_CheckExact(object) || PyDict_CheckExact(object);
}

static bool
goes_through_a_container(PyTypeObject *type)
{
    return type == &PyListIter_Type || type == &PyTupleIter_Type || type == &PyRangeIter_Type ||
           type == &PyDictIterKey_Type || type == &PyDictIterValue_Type ||
           type == &PyDictIterItem_Type;
}

/* tp_traverse is the one way to what enumerate and zip hold: their iterators, or a tuple of them,
 * and the last items, which may be taken for iterators, too. */
static int
visit_inner(PyObject *object, void *depth)
{
    if (PyTuple_CheckExact(object) && *(int *)depth == 0) {
        int deeper = 1;
        return Py_TYPE(object)->tp_traverse(object, visit_inner, &deeper);
    }
    return PyIter_Check(object) && !goes_through_a_container(Py_TYPE(object));
}

bool
mj_is_plain_iterator(PyObject *iterator)
{
    PyTypeObject *type = Py_TYPE(iterator);
    int depth = 0;
    if (type == &PyEnum_Type || type == &PyZip_Type) {
        return type->tp_traverse(iterator, visit_inner, &depth) == 0;
    }
    return goes_through_a_container(type);
}

static PyObject *
get_effects(PyObject *module, PyObject *unused)
{
    return PyLong_FromUnsignedLongLong(mj_effects);
}

static PyMethodDef methods[] = {
    {"set_reader", set_reader, METH_VARARGS,
     "set_reader(reader, functions, device_types): what reads tensors between two regions, when "
     "one of the functions is called with a torch.Tensor on a device of a type in the bit set"},
    {"effects", get_effects, METH_NOARGS,
     "effects(): how often something ran that may have written tensors without a trace"},
    {NULL},
};

int
mj_init_reading(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
