/* Calls of fused operators on NVIDIA GPUs, for the Python module. */
#ifndef MAGJIT_DVM_CUDA_CALLS_H
#define MAGJIT_DVM_CUDA_CALLS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace magjit_dvm {

/* cuda_spans(): of each launch since the last time it was asked, while `timing` was on, nanoseconds of
 * taking arguments, encoding, allocating results, putting addresses into words, and the driver. */
PyObject *py_cuda_spans(PyObject *, PyObject *);

/* Adds CudaFused. */
int add_cuda_fused(PyObject *module);

} // namespace magjit_dvm

#endif
