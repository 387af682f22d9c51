/* Calls of fused operators on NVIDIA GPUs, for the Python module. */
#ifndef MAGJIT_DVM_CUDA_CALLS_H
#define MAGJIT_DVM_CUDA_CALLS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace magjit_dvm {

/* cuda_hooks(kernel, allocate): what Python does when it is asked. kernel(device, R, approximate) is a
 * kernel's handle, and tells of the device by cuda_gpu; with R = 0 it only does that.
 * allocate(sizes, strides, dtype, device) is a tensor, or raises as torch does; device −1 is the CPU. */
PyObject *py_cuda_hooks(PyObject *, PyObject *args);

/* cuda_gpu(device, machine, counters, n_counters): tells of a GPU; see plan.py of Machine. */
PyObject *py_cuda_gpu(PyObject *, PyObject *args);

/* cuda_spans(): of each launch since the last time it was asked, while `timing` was on, nanoseconds of
 * taking arguments, encoding, allocating results, putting addresses into words, and the driver. */
PyObject *py_cuda_spans(PyObject *, PyObject *);

/* Adds CudaFused. */
int add_cuda_fused(PyObject *module);

} // namespace magjit_dvm

#endif
