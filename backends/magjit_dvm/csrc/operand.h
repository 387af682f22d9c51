/* A tensor of float32 in memory, as the machine's kernels for products take it. */
#ifndef MAGJIT_DVM_OPERAND_H
#define MAGJIT_DVM_OPERAND_H

#include "torch_abi.h"

namespace magjit_dvm {

struct Operand {
    int64_t ndim, *sizes, *strides;
    float *data;
};

/* Whether it is a plain tensor of the CPU whose innermost elements follow one another. */
inline bool take_floats(PyObject *object, Operand &found)
{
    if (!is_plain_tensor(object)) {
        return false;
    }
    const TorchLibrary &lib = torch_library;
    void *handle = tensor_handle(object);
    int32_t dtype, device, layout;
    if (lib.get_dtype(handle, &dtype) || lib.get_device_type(handle, &device) ||
        lib.get_layout(handle, &layout) || lib.get_dim(handle, &found.ndim)) {
        return false;
    }
    if (dtype != lib.dtypes[DT_f32] || device != lib.cpu || layout != lib.strided ||
        found.ndim < 1 || found.ndim > MAX_DIMS) {
        return false;
    }
    return !lib.get_sizes(handle, &found.sizes) && !lib.get_strides(handle, &found.strides) &&
           !lib.get_data(handle, (void **)&found.data) && found.strides[found.ndim - 1] == 1 &&
           is_negative(object) == 0;
}

} // namespace magjit_dvm

#endif
