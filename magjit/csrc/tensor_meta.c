/* Metadata of tensors: what a compiled graph may assume about its inputs.
 *
 *     meta := (type, dtype, device_type, device_index, sizes, strides | None, requires_grad, keys)
 *
 * dtype, device_type and device_index are torch's own numbers, keys the raw dispatch key set, which
 * says layout, conjugation, negation, inference mode and subclass hooks.  sizes and strides may
 * have None for a free dimension; requires_grad None is not compared.  A tensor whose metadata only
 * user code knows (a subclass with
 * __torch_dispatch__, a nested tensor, one inside vmap or grad) has none.
 */
#include "guard_torch.h"

#define ANY_DIM INT64_MIN

struct tensor_meta {
    PyObject *type;
    uint64_t keys;
    int32_t dtype, device_type, device_index;
    uint16_t device;      /* type and index as TensorImpl has them */
    int8_t requires_grad; /* -1: any */
    bool has_strides;
    int64_t ndim;
    int64_t dims[]; /* sizes, then strides */
};

/* ---- comparison ---- */

static inline bool
dims_match(const int64_t *expected, const int64_t *actual, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        if (expected[i] != actual[i] && expected[i] != ANY_DIM) {
            return false;
        }
    }
    return true;
}

static inline bool
keys_of(const torch_lib *lib, PyObject *tensor, const char *impl, uint64_t *keys)
{
    if (lib->keys_offset >= 0) {
        memcpy(keys, impl + lib->keys_offset, sizeof(*keys));
        return true;
    }
    return mj_torch_slow_keys(lib, tensor, keys) == 0;
}

static inline int
requires_grad_of(const torch_lib *lib, PyObject *tensor, const char *impl)
{
    return lib->requires_grad != NULL ? lib->requires_grad(impl)
                                      : mj_torch_slow_requires_grad(lib, tensor);
}

static bool
shim_matches(const torch_lib *lib, const tensor_meta *meta, void *handle)
{
    int32_t dtype, device_type, device_index;
    int64_t n, *dims;
    if (lib->dtype(handle, &dtype) || dtype != meta->dtype ||
        lib->device_type(handle, &device_type) || device_type != meta->device_type ||
        lib->device_index(handle, &device_index) || device_index != meta->device_index ||
        lib->dim(handle, &n) || n != meta->ndim || lib->sizes(handle, &dims) ||
        !dims_match(meta->dims, dims, n)) {
        return false;
    }
    return !meta->has_strides ||
           (!lib->strides(handle, &dims) && dims_match(meta->dims + n, dims, n));
}

static inline bool
raw_matches(const torch_lib *lib, const tensor_meta *meta, const char *impl)
{
    const int64_t *sizes, *strides;
    int64_t n;
    if (mj_torch_raw16(impl + lib->dtype_offset) != (uint16_t)meta->dtype ||
        mj_torch_raw16(impl + lib->device_offset) != meta->device) {
        return false;
    }
    mj_torch_raw_dims(impl + lib->dims_offset, &n, &sizes, &strides);
    return n == meta->ndim && dims_match(meta->dims, sizes, n) &&
           dims_match(meta->dims + n, strides, n);
}

bool
mj_meta_check(const tensor_meta *meta, PyObject *tensor)
{
    if ((PyObject *)Py_TYPE(tensor) != meta->type) {
        return false;
    }
    const torch_lib *lib = mj_torch();
    const char *impl = mj_torch_impl(lib, tensor);
    uint64_t keys;
    /* Keys first: with these keys what follows is known to be plain reads. */
    if (impl == NULL || !keys_of(lib, tensor, impl, &keys) || keys != meta->keys) {
        return false;
    }
    /* Strided tensors keep their sizes and strides in the TensorImpl. */
    bool same = lib->raw && meta->has_strides
                    ? raw_matches(lib, meta, impl)
                    : shim_matches(lib, meta, mj_torch_handle(lib, tensor));
    return same &&
           (meta->requires_grad < 0 || requires_grad_of(lib, tensor, impl) == meta->requires_grad);
}

/* ---- from and to tuples ---- */

static bool
parse_dims(PyObject *tuple, int64_t n, int64_t *out)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != n) {
        return false;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        out[i] = item == Py_None ? ANY_DIM : PyLong_Check(item) ? PyLong_AsLongLong(item) : -1;
        if (out[i] == -1) {
            return false;
        }
    }
    return true;
}

static bool
parse_int32(PyObject *item, int32_t *out)
{
    long value = PyLong_Check(item) ? PyLong_AsLong(item) : INT32_MIN;
    *out = (int32_t)value;
    return value > INT32_MIN && value <= INT32_MAX;
}

static bool
fill_meta(tensor_meta *meta, PyObject *tuple, const torch_lib *lib)
{
    PyObject *type = PyTuple_GET_ITEM(tuple, 0), *strides = PyTuple_GET_ITEM(tuple, 5);
    PyObject *requires_grad = PyTuple_GET_ITEM(tuple, 6), *keys = PyTuple_GET_ITEM(tuple, 7);
    if (!PyType_Check(type) || !PyType_IsSubtype((PyTypeObject *)type, lib->tensor_type) ||
        !PyLong_Check(keys)) {
        return false;
    }
    meta->type = Py_NewRef(type);
    meta->keys = PyLong_AsUnsignedLongLongMask(keys);
    meta->has_strides = strides != Py_None;
    meta->requires_grad = requires_grad == Py_None ? -1 : requires_grad == Py_True;
    bool ok = (requires_grad == Py_None || PyBool_Check(requires_grad)) &&
              !(meta->keys & lib->refused_keys) &&
              parse_int32(PyTuple_GET_ITEM(tuple, 1), &meta->dtype) &&
              parse_int32(PyTuple_GET_ITEM(tuple, 2), &meta->device_type) &&
              parse_int32(PyTuple_GET_ITEM(tuple, 3), &meta->device_index) &&
              parse_dims(PyTuple_GET_ITEM(tuple, 4), meta->ndim, meta->dims) &&
              (!meta->has_strides || parse_dims(strides, meta->ndim, meta->dims + meta->ndim));
    uint8_t device[2] = {(uint8_t)meta->device_type, (uint8_t)meta->device_index};
    memcpy(&meta->device, device, sizeof(device));
    return ok;
}

tensor_meta *
mj_meta_parse(PyObject *tuple)
{
    const torch_lib *lib = mj_torch_bind();
    if (lib == NULL || !PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 8 ||
        !PyTuple_Check(PyTuple_GET_ITEM(tuple, 4))) {
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(PyTuple_GET_ITEM(tuple, 4));
    tensor_meta *meta = PyMem_Calloc(1, sizeof(tensor_meta) + 2 * (size_t)n * sizeof(int64_t));
    if (meta == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    meta->ndim = n;
    if (!fill_meta(meta, tuple, lib)) {
        mj_meta_free(meta);
        return NULL;
    }
    return meta;
}

void
mj_meta_free(tensor_meta *meta)
{
    if (meta != NULL) {
        Py_XDECREF(meta->type);
        PyMem_Free(meta);
    }
}

int
mj_meta_traverse(tensor_meta *meta, visitproc visit, void *arg)
{
    if (meta != NULL) {
        Py_VISIT(meta->type);
    }
    return 0;
}

static PyObject *
dims_tuple(const int64_t *dims, int64_t n)
{
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) {
        PyObject *item = PyLong_FromLongLong(dims[i]);
        if (item == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, item);
    }
    return tuple;
}

static PyObject *
refuse(const char *why)
{
    PyErr_Format(PyExc_ValueError, "tensor without plain metadata: %s", why);
    return NULL;
}

static PyObject *
tensor_meta_of(PyObject *module, PyObject *tensor)
{
    const torch_lib *lib = mj_torch_bind();
    if (lib == NULL) {
        return NULL;
    }
    if (!PyObject_TypeCheck(tensor, lib->tensor_type)) {
        PyErr_Format(PyExc_TypeError, "expected a torch.Tensor, not %.100s",
                     Py_TYPE(tensor)->tp_name);
        return NULL;
    }
    const char *impl = mj_torch_impl(lib, tensor);
    void *handle = mj_torch_handle(lib, tensor);
    uint64_t keys;
    if (impl == NULL || !keys_of(lib, tensor, impl, &keys)) {
        return refuse("its dispatch keys cannot be read");
    }
    if (keys & lib->refused_keys) {
        return refuse("it dispatches to Python, is nested or belongs to a transform");
    }
    int requires_grad = requires_grad_of(lib, tensor, impl);
    int32_t dtype, device_type, device_index, layout;
    int64_t n, *dims;
    if (requires_grad < 0 || lib->dtype(handle, &dtype) || lib->device_type(handle, &device_type) ||
        lib->device_index(handle, &device_index) || lib->layout(handle, &layout) ||
        lib->dim(handle, &n) || lib->sizes(handle, &dims)) {
        return refuse("torch's C shim cannot read it");
    }
    PyObject *sizes = dims_tuple(dims, n), *strides = Py_NewRef(Py_None);
    if (layout == 0 && !lib->strides(handle, &dims)) {
        Py_SETREF(strides, dims_tuple(dims, n));
    }
    if (sizes == NULL || strides == NULL) {
        Py_XDECREF(sizes);
        Py_XDECREF(strides);
        return NULL;
    }
    return Py_BuildValue("(OiiiNNOK)", Py_TYPE(tensor), dtype, device_type, device_index, sizes,
                         strides, requires_grad ? Py_True : Py_False, (unsigned long long)keys);
}

/* ---- sizes ---- */

bool
mj_tensor_dims(PyObject *tensor, tensor_dims *dims)
{
    const torch_lib *lib = mj_torch();
    if (lib == NULL || !PyObject_TypeCheck(tensor, lib->tensor_type)) {
        return false;
    }
    const char *impl = mj_torch_impl(lib, tensor);
    void *handle = mj_torch_handle(lib, tensor);
    uint64_t keys;
    int32_t layout;
    int64_t *sizes, *strides = NULL;
    dims->offset = 0;
    if (impl == NULL || !keys_of(lib, tensor, impl, &keys) || (keys & lib->refused_keys) ||
        lib->layout(handle, &layout) || lib->dim(handle, &dims->n) || lib->sizes(handle, &sizes) ||
        (layout == 0 &&
         (lib->strides(handle, &strides) || lib->storage_offset(handle, &dims->offset)))) {
        return false;
    }
    dims->sizes = sizes;
    dims->strides = strides;
    return true;
}

/* ---- overlap ---- */

bool
mj_tensor_range(PyObject *tensor, uintptr_t *first, uintptr_t *last)
{
    const torch_lib *lib = mj_torch();
    if (lib == NULL || !PyObject_TypeCheck(tensor, lib->tensor_type)) {
        return false;
    }
    const char *impl = mj_torch_impl(lib, tensor);
    void *handle = mj_torch_handle(lib, tensor);
    uint64_t keys;
    int32_t dtype, layout;
    int64_t n, *sizes, *strides, *data, extent = 1;
    if (impl == NULL || !keys_of(lib, tensor, impl, &keys) || (keys & lib->refused_keys) ||
        lib->layout(handle, &layout) || layout != 0 || lib->dim(handle, &n) ||
        lib->sizes(handle, &sizes) || lib->strides(handle, &strides) ||
        lib->dtype(handle, &dtype)) {
        return false;
    }
    *first = *last = 0;
    for (int64_t i = 0; i < n; i++) {
        if (sizes[i] == 0) {
            return true;
        }
        extent += (sizes[i] - 1) * strides[i];
    }
    if (lib->data_ptr(handle, &data) || data == NULL) {
        return false;
    }
    *first = (uintptr_t)data;
    *last = *first + (uintptr_t)extent * lib->element_size(dtype);
    return true;
}

int
mj_tensor_relation(PyObject *a, PyObject *b, int64_t *distance)
{
    uintptr_t a0, a1, b0, b1;
    if (!mj_tensor_range(a, &a0, &a1) || !mj_tensor_range(b, &b0, &b1)) {
        return -1;
    }
    *distance = (int64_t)(b0 - a0);
    return a0 < a1 && b0 < b1 && a0 < b1 && b0 < a1;
}

static PyObject *
tensor_relation(PyObject *module, PyObject *args)
{
    PyObject *a, *b;
    int64_t distance;
    if (!PyArg_ParseTuple(args, "OO", &a, &b) || mj_torch_bind() == NULL) {
        return NULL;
    }
    int relation = mj_tensor_relation(a, b, &distance);
    if (relation < 0) {
        return refuse("the bytes it occupies are not known");
    }
    if (relation == 0) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLongLong(distance);
}

static PyObject *
torch_binding(PyObject *module, PyObject *unused)
{
    const torch_lib *lib = mj_torch_bind();
    if (lib == NULL) {
        return NULL;
    }
    return Py_BuildValue("{s:n,s:n,s:O,s:O}", "tensor_offset", lib->tensor_offset, "keys_offset",
                         lib->keys_offset, "raw", lib->raw ? Py_True : Py_False, "requires_grad",
                         lib->requires_grad != NULL ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"torch_binding", torch_binding, METH_NOARGS,
     "torch_binding(): how tensors of the loaded torch are read: the offset of the C++ tensor in "
     "its\n"
     "Python object, that of the dispatch keys (-1: asked of Python), whether sizes, strides, "
     "dtype\n"
     "and device are read in place (else through the C shim), and whether requires_grad is an\n"
     "exported function (else a Python property)"},
    {"tensor_meta", tensor_meta_of, METH_O,
     "tensor_meta(tensor): the metadata as a guard program compares it"},
    {"tensor_relation", tensor_relation, METH_VARARGS,
     "tensor_relation(a, b): None if they share no byte, else the distance in bytes from a's first "
     "element to b's"},
    {NULL},
};

int
mj_init_tensor_meta(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
