/* Arguments of fused operators on NVIDIA GPUs: the metadata of tensors, and numbers. */
#include <algorithm>

#include "cuda_calls.h"
#include "cuda_gpus.h"
#include "module.h"
#include "torch_abi.h"

namespace magjit_dvm {

using namespace cuda;

namespace {

/* The metadata of a plain tensor. */
Taken take_metadata(const Input &in, void *handle, Argument &value)
{
    const TorchLibrary &lib = torch_library;
    int32_t dtype;
    int64_t ndim;
    void *data;
    if (lib.get_dtype(handle, &dtype) || lib.get_dim(handle, &ndim) ||
        lib.get_sizes(handle, (int64_t **)&value.sizes) ||
        lib.get_strides(handle, (int64_t **)&value.strides) || lib.get_data(handle, &data)) {
        return TO_PYTHON;
    }
    value.data = (uint64_t)data;
    value.fits = dtype == lib.dtypes[in.dtype] && ndim == in.ndim;
    return TAKEN;
}

Taken take_tensor(const Input &in, PyObject *object, int32_t device_type, Argument &value,
                  int &device, const char *&reason)
{
    const TorchLibrary &lib = torch_library;
    int32_t type, index, layout;
    reason = "not a plain tensor on a GPU";
    if (!is_plain_tensor(object)) {
        return NOT_TAKEN;
    }
    void *handle = tensor_handle(object);
    if (lib.get_device_type(handle, &type) || lib.get_device_index(handle, &index) ||
        lib.get_layout(handle, &layout)) {
        return TO_PYTHON;
    }
    if (type != device_type) {
        return NOT_TAKEN;
    }
    index = std::max(index, 0);
    reason = "tensors on several GPUs";
    if (device != -1 && device != index) {
        return NOT_TAKEN;
    }
    device = index;
    reason = "a tensor whose memory means something else";
    int negative = layout == lib.strided ? is_negative(object) : 1;
    if (negative) {
        return negative < 0 ? TO_PYTHON : NOT_TAKEN;
    }
    return take_metadata(in, handle, value);
}

Taken take_number(const Input &in, PyObject *object, Argument &value, const char *&reason)
{
    reason = "not a number";
    value.floating = PyFloat_Check(object);
    if (value.floating) {
        value.number = PyFloat_AS_DOUBLE(object);
        return in.kind == INPUT_int ? NOT_TAKEN : TAKEN;
    }
    if (!PyLong_Check(object)) {
        return NOT_TAKEN;
    }
    int overflow;
    value.integer = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow ? TO_PYTHON : TAKEN;
}

} // namespace

Taken take_arguments(const CudaFused *self, PyObject *const *args, Py_ssize_t n, int32_t device_type,
                     Argument *given, int &device, const char *&reason)
{
    device = -1;
    if (!self->program || n != (Py_ssize_t)self->program->inputs.size()) {
        return TO_PYTHON;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        const Input &in = self->program->inputs[i];
        Taken taken = in.kind == INPUT_tensor
                          ? take_tensor(in, args[i], device_type, given[i], device, reason)
                          : take_number(in, args[i], given[i], reason);
        if (taken != TAKEN) {
            return taken;
        }
    }
    device = device < 0 ? self->home : device;
    return device < MAX_GPUS ? TAKEN : TO_PYTHON;
}

bool read_key(const Program &program, const Argument *given, const Device &machine, MemoKey &key)
{
    key.add(machine.multiprocessors);
    key.add(machine.shared_bytes);
    key.add(machine.widest);
    for (size_t i = 0; i < program.inputs.size(); i++) {
        const Input &in = program.inputs[i];
        const Argument &value = given[i];
        if (in.kind == INPUT_tensor) {
            if (!value.fits) {
                return false;
            }
            key.add(value.data % 16);
            key.add(in, value.sizes, value.strides);
        } else if (value.floating) {
            key.add((uint64_t)true);
            key.add(value.number);
        } else {
            key.add((uint64_t)false);
            key.add(value.integer);
        }
    }
    return true;
}

} // namespace magjit_dvm
