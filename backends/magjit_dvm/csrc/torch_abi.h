/* Tensors without torch's headers: functions of the stable C shim, looked up in the loaded library,
 * and the one offset of the tensor in its Python object, which is measured. */
#ifndef MAGJIT_DVM_TORCH_ABI_H
#define MAGJIT_DVM_TORCH_ABI_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "bytecode.h"

namespace magjit_dvm {

struct TorchLibrary {
    int32_t (*get_dim)(void *, int64_t *);
    int32_t (*get_sizes)(void *, int64_t **);
    int32_t (*get_strides)(void *, int64_t **);
    int32_t (*get_data)(void *, void **);
    int32_t (*get_dtype)(void *, int32_t *);
    int32_t (*get_device_type)(void *, int32_t *);
    int32_t (*get_device_index)(void *, int32_t *);
    int32_t (*get_layout)(void *, int32_t *);
    int32_t (*empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t,
                             void **);
    int32_t (*delete_tensor)(void *);
    int32_t (*reinterpret)(void *, int64_t, const int64_t *, const int64_t *, int64_t,
                           void **); /* or NULL */
    PyObject *(*wrap)(const void *); /* THPVariable_Wrap, or NULL */
    int (*num_threads)();            /* at::get_num_threads, or NULL */
    int (*max_threads)();            /* omp_get_max_threads of torch's runtime, or NULL */
    bool (*is_negative)(const void *); /* at::_ops::is_neg, or NULL */
    int32_t dtypes[N_DTYPES];          /* torch's numbers */
    int32_t cpu, cuda, strided;
    Py_ssize_t offset; /* of at::Tensor in its Python object */
    PyTypeObject *tensor, *parameter;
    PyObject *steal; /* torch._C._aoti's function, where wrap is missing */
};

extern TorchLibrary torch_library;

/* Looks everything up; `example` is a tensor whose impl lies at address `impl`. -1 with an exception
 * set if this torch lacks something. */
int bind_torch(PyObject *example, unsigned long long impl, PyObject *tensor, PyObject *parameter,
               PyObject *steal);

inline void *tensor_handle(PyObject *tensor) { return (char *)tensor + torch_library.offset; }

inline bool is_plain_tensor(PyObject *object)
{
    return Py_TYPE(object) == torch_library.tensor || Py_TYPE(object) == torch_library.parameter;
}

/* The Python object of a tensor, which takes the handle. */
PyObject *wrapped(void *handle);

/* A new tensor of torch's allocator, or NULL without an exception. */
PyObject *empty_tensor(int ndim, const int64_t *sizes, const int64_t *strides, DType dtype,
                       int32_t device_type, int32_t device, char **data);

/* Whether the elements are those of memory, negated; −1, it may be with an exception set, if nobody
 * knows. */
int is_negative(PyObject *tensor);

/* A new CPU tensor; *data is where its elements are. NULL with an exception set if it fails. */
PyObject *new_tensor(int ndim, const int64_t *sizes, const int64_t *strides, DType dtype,
                     char **data);

} // namespace magjit_dvm

#endif
