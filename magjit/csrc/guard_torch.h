/* The loaded torch, without its headers: functions of the stable C shim and a few exported C++
 * functions, found by name in the libraries that the process has loaded, and two offsets that are
 * measured and verified. */
#ifndef MAGJIT_GUARD_TORCH_H
#define MAGJIT_GUARD_TORCH_H

#include "guard.h"

typedef int32_t (*shim_int64)(void *tensor, int64_t *out);
typedef int32_t (*shim_int32)(void *tensor, int32_t *out);
typedef int32_t (*shim_pointer)(void *tensor, int64_t **out);

typedef struct {
    /* aoti_torch_get_*: 0 on success */
    shim_int64 dim, storage_offset;
    shim_pointer sizes, strides, data_ptr;
    shim_int32 dtype, device_type, device_index, layout;
    size_t (*element_size)(int32_t dtype);
    /* c10::TensorImpl::requires_grad() const; NULL: not exported */
    bool (*requires_grad)(const void *impl);

    Py_ssize_t tensor_offset; /* of at::Tensor in its Python object */
    Py_ssize_t keys_offset;   /* of the dispatch key set in TensorImpl, -1: unknown */
    /* Of number of dimensions, dtype (16 bits) and device (type, index: 8 bits each) in TensorImpl;
     * all or none. */
    bool raw;
    Py_ssize_t dims_offset, dtype_offset, device_offset;
    uint64_t refused_keys; /* keys with which reading sizes would run user code or is not defined */
    PyTypeObject *tensor_type; /* torch._C.TensorBase */
    PyGetSetDef *requires_grad_getset;
    PyObject *plain_types[2]; /* torch.Tensor, torch.nn.Parameter */
    PyObject *dispatch_keys;  /* torch._C._dispatch_keys */
} torch_lib;

/* NULL while torch is not imported or could not be bound; never sets an exception. */
const torch_lib *mj_torch(void);
/* The same, after one more attempt if torch was imported since; NULL with an exception set if it
 * cannot be bound. */
const torch_lib *mj_torch_bind(void);

/* An exported function of torch's libraries, or NULL; only after binding. */
void *mj_torch_symbol(const char *name);

/* Key set of a tensor's impl by the slow public way; -1 with no exception if impossible. */
int mj_torch_slow_keys(const torch_lib *lib, PyObject *tensor, uint64_t *keys);
/* requires_grad by the getset's C function; -1 if that could run user code. */
int mj_torch_slow_requires_grad(const torch_lib *lib, PyObject *tensor);

static inline void *
mj_torch_handle(const torch_lib *lib, PyObject *tensor)
{
    return (char *)tensor + lib->tensor_offset;
}

static inline const char *
mj_torch_impl(const torch_lib *lib, PyObject *tensor)
{
    return *(const char **)mj_torch_handle(lib, tensor);
}

/* Up to 5 sizes and 5 strides are in the TensorImpl itself, more are in a block of their own. */
enum { INLINE_DIMS = 5 };

static inline void
mj_torch_raw_dims(const char *dims, int64_t *n, const int64_t **sizes, const int64_t **strides)
{
    memcpy(n, dims, sizeof(*n));
    const int64_t *first = (const int64_t *)(dims + sizeof(*n));
    if (*n > INLINE_DIMS) {
        memcpy(&first, dims + sizeof(*n), sizeof(first));
    }
    *sizes = first;
    *strides = first + (*n > INLINE_DIMS ? *n : INLINE_DIMS);
}

static inline uint16_t
mj_torch_raw16(const char *address)
{
    uint16_t value;
    memcpy(&value, address, sizeof(value));
    return value;
}

#endif /* MAGJIT_GUARD_TORCH_H */
