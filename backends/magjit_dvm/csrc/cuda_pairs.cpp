/* Two launches one behind the other, the second of what the first leaves in memory that both have for
 * as long as it takes: see cuda/channel_sums.py. */
#include <cstring>

#include "cuda_calls.h"
#include "cuda_gpus.h"
#include "cuda_launch.h"
#include "torch_abi.h"

namespace magjit_dvm {

using namespace cuda;

namespace {

struct Plan {
    int device;
    unsigned long long first, second;
    unsigned blocks, end_blocks, threads;
    long long parts;
    const char *sizes, *end_sizes;
    Py_ssize_t n_sizes, n_end_sizes;
};

/* The parameter of a launch, as it is put together. */
struct Parameter {
    alignas(16) char bytes[IMAGE_BYTES];
    int n = 0;

    bool add(const void *from, Py_ssize_t size)
    {
        if (size > IMAGE_BYTES - n) {
            PyErr_SetString(PyExc_ValueError, "a parameter that is too long");
            return false;
        }
        memcpy(bytes + n, from, (size_t)size);
        n += (int)size;
        return true;
    }
};

bool read_plan(PyObject *tuple, Plan &plan)
{
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "a plan is a tuple");
        return false;
    }
    bool known = PyArg_ParseTuple(tuple, "iKKIIILy#y#:plan", &plan.device, &plan.first, &plan.second,
                                  &plan.blocks, &plan.end_blocks, &plan.threads, &plan.parts,
                                  &plan.sizes, &plan.n_sizes, &plan.end_sizes, &plan.n_end_sizes);
    if (known && (plan.device < 0 || plan.device >= MAX_GPUS)) {
        PyErr_SetString(PyExc_ValueError, "a GPU of no number");
        return false;
    }
    return known;
}

/* A tensor for each of (dtype, size, …). */
bool make(PyObject *shapes, int32_t device_type, int device, CudaResults &results)
{
    if (!PyTuple_Check(shapes) || PyTuple_GET_SIZE(shapes) > MAX_OUTPUTS) {
        PyErr_SetString(PyExc_TypeError, "shapes are a tuple of a few");
        return false;
    }
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(shapes); k++) {
        PyObject *one = PyTuple_GET_ITEM(shapes, k);
        Py_ssize_t ndim = PyTuple_Check(one) ? PyTuple_GET_SIZE(one) - 1 : -1;
        if (ndim < 0 || ndim > MAX_DIMS) {
            PyErr_SetString(PyExc_TypeError, "a shape is a dtype and sizes");
            return false;
        }
        long dtype = PyLong_AsLong(PyTuple_GET_ITEM(one, 0));
        Shape layout{};
        int64_t stride = 1;
        for (Py_ssize_t d = ndim; d-- > 0; stride *= layout.sizes[d]) {
            layout.sizes[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(one, d + 1));
            layout.strides[d] = stride;
        }
        if (PyErr_Occurred() || dtype < 0 || dtype >= N_DTYPES) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_ValueError, "a dtype of no number");
            }
            return false;
        }
        char *data = nullptr;
        PyObject *made = new_memory(device_type, (int)ndim, layout, (DType)dtype, device, &data);
        if (!made) {
            return false;
        }
        results.addresses[results.count] = (uint64_t)data;
        results.made[results.count++] = made;
    }
    return true;
}

/* Addresses: of tensors, of what is made where there is its number, 0 of None. */
bool add_addresses(PyObject *given, const CudaResults &results, Parameter &parameter)
{
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(given); k++) {
        PyObject *one = PyTuple_GET_ITEM(given, k);
        void *address = nullptr;
        if (PyLong_Check(one)) {
            long number = PyLong_AsLong(one);
            if (number < 0 || number >= results.count) {
                PyErr_SetString(PyExc_ValueError, "a result of no number");
                return false;
            }
            address = (void *)results.addresses[number];
        } else if (one != Py_None && torch_library.get_data(tensor_handle(one), &address)) {
            PyErr_SetString(PyExc_RuntimeError, "a tensor without memory");
            return false;
        }
        if (!parameter.add(&address, sizeof(address))) {
            return false;
        }
    }
    return true;
}

/* Whether all tensors are plain ones on this GPU, whose memory means what it says. */
bool is_on(PyObject *given, int device, int32_t &device_type)
{
    const TorchLibrary &lib = torch_library;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(given); k++) {
        PyObject *one = PyTuple_GET_ITEM(given, k);
        int32_t index;
        if (one == Py_None || PyLong_Check(one)) {
            continue;
        }
        if (!is_plain_tensor(one) || lib.get_device_type(tensor_handle(one), &device_type) ||
            lib.get_device_index(tensor_handle(one), &index) ||
            (index > 0 ? index : 0) != device || is_negative(one)) {
            return false;
        }
    }
    return true;
}

int launch_one(unsigned long long function, unsigned blocks, unsigned threads, void *stream,
               Parameter &parameter)
{
    Launch one{};
    one.function = function;
    one.blocks = blocks;
    one.threads = threads;
    one.stream = stream;
    one.parameter = parameter.bytes;
    one.n_bytes = parameter.n;
    return launch(one);
}

} // namespace

PyObject *cuda_pair(PyObject *, PyObject *const *args, Py_ssize_t n)
{
    Plan plan;
    if (n != 5 || !PyTuple_Check(args[1]) || !PyTuple_Check(args[2]) || !PyBytes_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "cuda_pair(plan, given, ending, numbers, shapes)");
        return nullptr;
    }
    if (!read_plan(args[0], plan)) {
        return nullptr;
    }
    int32_t device_type = torch_library.cuda;
    if (!is_on(args[1], plan.device, device_type) || !is_on(args[2], plan.device, device_type)) {
        return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
    }
    CudaResults results;
    Parameter first, second;
    void *stream;
    char *parts = nullptr;
    Shape layout{};
    layout.sizes[0] = plan.parts;
    layout.strides[0] = 1;
    if (!make(args[4], device_type, plan.device, results) ||
        !(results.parts = new_memory(device_type, 1, layout, DT_f32, plan.device, &parts)) ||
        current_stream(device_type, plan.device, &stream)) {
        return nullptr;
    }
    const char *numbers = PyBytes_AS_STRING(args[3]);
    bool added = add_addresses(args[1], results, first) && first.add(&parts, sizeof(parts)) &&
                 first.add(plan.sizes, plan.n_sizes) && second.add(&parts, sizeof(parts)) &&
                 add_addresses(args[2], results, second) &&
                 second.add(plan.end_sizes, plan.n_end_sizes) &&
                 second.add(numbers, PyBytes_GET_SIZE(args[3]));
    if (!added || launch_one(plan.first, plan.blocks, plan.threads, stream, first) ||
        launch_one(plan.second, plan.end_blocks, plan.threads, stream, second)) {
        return nullptr;
    }
    return results.take();
}

} // namespace magjit_dvm
