/* GPUs as calls know them. Python is asked for one, and for a kernel, when it is first needed. */
#include "cuda_gpus.h"

#include <dlfcn.h>

#include "torch_abi.h"

namespace magjit_dvm {

using namespace cuda;

Gpu gpus[MAX_GPUS];
PyObject *allocate_hook;

namespace {

PyObject *kernel_hook;

uint64_t ask_for_kernel(int device, int each, bool approximate, Form form, bool waits)
{
    if (!kernel_hook) {
        PyErr_SetString(PyExc_RuntimeError, "nobody to ask for kernels");
        return 0;
    }
    PyObject *found = PyObject_CallFunction(kernel_hook, "iiiii", device, each, (int)approximate,
                                            (int)form, (int)waits);
    uint64_t function = found ? PyLong_AsUnsignedLongLong(found) : 0;
    Py_XDECREF(found);
    if (!PyErr_Occurred() && !gpus[device].known) {
        PyErr_SetString(PyExc_RuntimeError, "a GPU that nobody has told of");
    }
    return PyErr_Occurred() ? 0 : function;
}

} // namespace

bool is_known(int device)
{
    if (!gpus[device].known) {
        ask_for_kernel(device, 0, false, ALONE, true);
    }
    return gpus[device].known && !PyErr_Occurred();
}

uint64_t kernel_of(int device, int each, bool approximate, Form form, bool waits)
{
    uint64_t &known = gpus[device].kernels[form][each / 8][approximate];
    if (!known) {
        known = ask_for_kernel(device, each, approximate, form, waits);
    }
    return known;
}

uint64_t kernel_of_sums(int device, bool waits)
{
    uint64_t &known = gpus[device].sums;
    if (!known) {
        known = ask_for_kernel(device, SUMS, false, ALONE, waits);
    }
    return known;
}

int current_stream(int32_t device_type, int device, void **stream)
{
    static int32_t (*find)(int32_t, void **);
    *stream = nullptr;
    if (device_type != torch_library.cuda) {
        return 0; /* a driver without streams, in tests */
    }
    if (!find) {
        void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        find = library ? (decltype(find))dlsym(library, "aoti_torch_get_current_cuda_stream")
                       : nullptr;
    }
    if (find && !find(device, stream)) {
        return 0;
    }
    PyObject *torch_c = PyImport_ImportModule("torch._C");
    PyObject *found =
        torch_c ? PyObject_CallMethod(torch_c, "_cuda_getCurrentRawStream", "i", device) : nullptr;
    *stream = found ? PyLong_AsVoidPtr(found) : nullptr;
    Py_XDECREF(found);
    Py_XDECREF(torch_c);
    return PyErr_Occurred() ? -1 : 0;
}

int read_device(PyObject *tuple, Device &machine)
{
    long long multiprocessors, shared, widest;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "the sizes of a GPU are a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "LLL:machine", &multiprocessors, &shared, &widest)) {
        return -1;
    }
    if (multiprocessors < 1) {
        PyErr_SetString(PyExc_ValueError, "a GPU has a multiprocessor at least");
        return -1;
    }
    machine = {multiprocessors, shared, widest};
    return 0;
}

PyObject *py_cuda_hooks(PyObject *, PyObject *args)
{
    PyObject *kernel, *allocate;
    if (!PyArg_ParseTuple(args, "OO:cuda_hooks", &kernel, &allocate)) {
        return nullptr;
    }
    Py_XSETREF(kernel_hook, Py_NewRef(kernel));
    Py_XSETREF(allocate_hook, Py_NewRef(allocate));
    Py_RETURN_NONE;
}

PyObject *py_cuda_gpu(PyObject *, PyObject *args)
{
    int device;
    PyObject *sizes;
    Device machine;
    unsigned long long counters, n_counters;
    if (!PyArg_ParseTuple(args, "iOKK:cuda_gpu", &device, &sizes, &counters, &n_counters) ||
        read_device(sizes, machine)) {
        return nullptr;
    }
    if (device < 0 || device >= MAX_GPUS) {
        PyErr_SetString(PyExc_ValueError, "a GPU of no number");
        return nullptr;
    }
    gpus[device] = Gpu{true, machine, counters, n_counters, {}, 0};
    Py_RETURN_NONE;
}

} // namespace magjit_dvm
