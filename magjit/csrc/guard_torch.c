/* Binding of the loaded torch: see guard_torch.h.
 *
 * The functions have C linkage in torch's stable shim (aoti_torch_*), or are exported C++ functions
 * whose mangled name includes their parameter types: a changed signature is another name and is not
 * found.  Every measured offset is verified against what Python says about tensors of many kinds;
 * where that fails the slow public way is used.
 */
#define _GNU_SOURCE
#include "guard_torch.h"

#include <dlfcn.h>

static torch_lib lib;
static enum { UNBOUND, BOUND, FAILED } state;

/* Upper bound that torch itself asserts for sizeof(TensorImpl). */
enum { IMPL_BYTES = 26 * 8 };

typedef struct {
    const char *name;
    void *target;
    bool required;
} symbol;

static const symbol symbols[] = {
    {"aoti_torch_get_dim", &lib.dim, true},
    {"aoti_torch_get_sizes", &lib.sizes, true},
    {"aoti_torch_get_strides", &lib.strides, true},
    {"aoti_torch_get_data_ptr", &lib.data_ptr, true},
    {"aoti_torch_get_storage_offset", &lib.storage_offset, true},
    {"aoti_torch_get_dtype", &lib.dtype, true},
    {"aoti_torch_get_device_type", &lib.device_type, true},
    {"aoti_torch_get_device_index", &lib.device_index, true},
    {"aoti_torch_get_layout", &lib.layout, true},
    {"aoti_torch_dtype_element_size", &lib.element_size, true},
    {"_ZNK3c1010TensorImpl13requires_gradEv", &lib.requires_grad, false},
};

/* ---- slow public ways ---- */

int
mj_torch_slow_keys(const torch_lib *l, PyObject *tensor, uint64_t *keys)
{
    PyObject *set = PyObject_CallOneArg(l->dispatch_keys, tensor);
    PyObject *raw = set != NULL ? PyObject_CallMethod(set, "raw_repr", NULL) : NULL;
    int status = -1;
    if (raw != NULL) {
        *keys = PyLong_AsUnsignedLongLongMask(raw);
        status = 0;
    }
    Py_XDECREF(set);
    Py_XDECREF(raw);
    PyErr_Clear();
    return status;
}

int
mj_torch_slow_requires_grad(const torch_lib *l, PyObject *tensor)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (l->requires_grad_getset == NULL ||
        (type != l->plain_types[0] && type != l->plain_types[1])) {
        return -1;
    }
    PyObject *value = l->requires_grad_getset->get(tensor, l->requires_grad_getset->closure);
    int result = value == Py_True ? 1 : value == Py_False ? 0 : -1;
    Py_XDECREF(value);
    PyErr_Clear();
    return result;
}

/* ---- symbols ---- */

static void *
open_library(PyObject *torch, const char *name)
{
    void *handle = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (handle != NULL) {
        return handle;
    }
    PyObject *file = PyObject_GetAttrString(torch, "__file__");
    const char *path = file != NULL ? PyUnicode_AsUTF8(file) : NULL;
    const char *slash = path != NULL ? strrchr(path, '/') : NULL;
    if (slash != NULL) {
        PyObject *full = PyUnicode_FromFormat("%.*s/lib/%s", (int)(slash - path), path, name);
        const char *text = full != NULL ? PyUnicode_AsUTF8(full) : NULL;
        handle = text != NULL ? dlopen(text, RTLD_LAZY | RTLD_NOLOAD) : NULL;
        Py_XDECREF(full);
    }
    Py_XDECREF(file);
    PyErr_Clear();
    return handle;
}

static void *handles[2];

void *
mj_torch_symbol(const char *name)
{
    void *address = NULL;
    for (int i = 0; address == NULL && i < 2; i++) {
        address = handles[i] != NULL ? dlsym(handles[i], name) : NULL;
    }
    return address != NULL ? address : dlsym(RTLD_DEFAULT, name);
}

static int
find_symbols(PyObject *torch)
{
    handles[0] = open_library(torch, "libtorch_cpu.so");
    handles[1] = open_library(torch, "libc10.so");
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        const symbol *s = &symbols[i];
        void *address = mj_torch_symbol(s->name);
        if (address == NULL && s->required) {
            PyErr_Format(PyExc_RuntimeError, "this torch does not export %s", s->name);
            return -1;
        }
        memcpy(s->target, &address, sizeof(address));
    }
    return 0;
}

/* ---- measured offsets ---- */

/* Tensors of many kinds; each expression is torch's public API. */
static const char sample_source[] =
    "import torch, warnings\n"
    "from torch.utils._python_dispatch import _disable_current_modes\n"
    "def make():\n"
    "    with (warnings.catch_warnings(), torch._C.DisableTorchFunction(), "
    "_disable_current_modes(),\n"
    "          torch.inference_mode(False)):\n"
    "        warnings.simplefilter('ignore')\n"
    "        a = torch.zeros(2, 3)\n"
    "        b = torch.zeros(4, 5, 6, requires_grad=True)\n"
    "        c = torch.zeros(3, dtype=torch.complex64)\n"
    "        with torch.inference_mode():\n"
    "            d = torch.zeros(7, dtype=torch.bfloat16)\n"
    "        with torch.enable_grad():\n"
    "            e = b.transpose(0, 2) * 2\n"
    "        return [a, b, c, c.conj(), c.conj().imag, d, e, b.detach(), torch.zeros((), "
    "dtype=torch.int64),\n"
    "                torch.zeros(1, 2, 1, 2, 1, 2, 1, dtype=torch.bool), torch.zeros(2, 3, "
    "device='meta'),\n"
    "                torch.nn.Parameter(torch.zeros(9)), torch.eye(3).to_sparse(), torch.zeros(2, "
    "0),\n"
    "                torch.zeros(6, 5, 4, 3, 2).permute(4, 0, 2, 1, 3)]\n"
    "samples = make()\n"
    "described = [(t._cdata, torch._C._dispatch_keys(t).raw_repr(), t.requires_grad, "
    "tuple(t.shape),\n"
    "              tuple(t.stride()) if t.layout is torch.strided else None, t.element_size()) for "
    "t in samples]\n"
    "refused = 0\n"
    "for key in ('Python', 'PythonTLSSnapshot', 'NestedTensor', 'FuncTorchBatched', "
    "'FuncTorchGradWrapper',\n"
    "            'Functionalize'):\n"
    "    key = getattr(torch._C.DispatchKey, key, None)\n"
    "    if key is not None:\n"
    "        refused |= torch._C.DispatchKeySet(key).raw_repr()\n"
    "tensor, parameter, base = torch.Tensor, torch.nn.Parameter, torch._C.TensorBase\n"
    "dispatch_keys = torch._C._dispatch_keys\n"
    "device, size = torch.device, torch.Size\n";

static bool
find_tensor_offset(PyObject *samples, PyObject *described)
{
    Py_ssize_t limit = lib.tensor_type->tp_basicsize;
    for (Py_ssize_t offset = (Py_ssize_t)sizeof(PyObject); offset + 8 <= limit; offset += 8) {
        bool ok = true;
        for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(samples); i++) {
            void *impl = PyLong_AsVoidPtr(PyTuple_GET_ITEM(PyList_GET_ITEM(described, i), 0));
            ok = impl != NULL && *(void **)((char *)PyList_GET_ITEM(samples, i) + offset) == impl;
        }
        if (ok) {
            lib.tensor_offset = offset;
            return true;
        }
    }
    return false;
}

static bool
same_ints(PyObject *tuple, const int64_t *values, int64_t n)
{
    if (PyTuple_GET_SIZE(tuple) != n) {
        return false;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)) != values[i]) {
            return false;
        }
    }
    return true;
}

/* The only offset in TensorImpl at which every sample has what is expected of it; -1 if there is
 * none or several. */
static Py_ssize_t
find_offset(PyObject *samples, PyObject *described, Py_ssize_t step,
            bool (*expected)(const char *address, void *handle, PyObject *described))
{
    Py_ssize_t found = -1;
    for (Py_ssize_t offset = 0; offset + 8 <= IMPL_BYTES; offset += step) {
        bool ok = true;
        for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(samples); i++) {
            PyObject *tensor = PyList_GET_ITEM(samples, i);
            ok = expected(mj_torch_impl(&lib, tensor) + offset, mj_torch_handle(&lib, tensor),
                          PyList_GET_ITEM(described, i));
        }
        if (ok && found >= 0) {
            return -1;
        }
        if (ok) {
            found = offset;
        }
    }
    return found;
}

static bool
is_keys(const char *address, void *handle, PyObject *described)
{
    return *(const uint64_t *)address ==
           PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(described, 1));
}

static bool
is_dtype(const char *address, void *handle, PyObject *described)
{
    int32_t dtype;
    return lib.dtype(handle, &dtype) == 0 && mj_torch_raw16(address) == dtype;
}

static bool
is_device(const char *address, void *handle, PyObject *described)
{
    int32_t type, index;
    return lib.device_type(handle, &type) == 0 && lib.device_index(handle, &index) == 0 &&
           (int8_t)address[0] == type && (int8_t)address[1] == index;
}

static bool
is_dims(const char *address, void *handle, PyObject *described)
{
    PyObject *sizes = PyTuple_GET_ITEM(described, 3), *strides = PyTuple_GET_ITEM(described, 4);
    const int64_t *raw_sizes, *raw_strides;
    int64_t n;
    memcpy(&n, address, sizeof(n));
    if (n != PyTuple_GET_SIZE(sizes)) {
        return false; /* only with the right number is the address of a block of dimensions one */
    }
    int64_t *shim;
    mj_torch_raw_dims(address, &n, &raw_sizes, &raw_strides);
    if (n > INLINE_DIMS && (lib.sizes(handle, &shim) || raw_sizes != shim)) {
        return false;
    }
    return same_ints(sizes, raw_sizes, n) &&
           (strides == Py_None || same_ints(strides, raw_strides, n));
}

static void
find_impl_offsets(PyObject *samples, PyObject *described)
{
    lib.keys_offset = find_offset(samples, described, 8, is_keys);
    lib.dims_offset = find_offset(samples, described, 8, is_dims);
    lib.dtype_offset = find_offset(samples, described, 2, is_dtype);
    lib.device_offset = find_offset(samples, described, 1, is_device);
    lib.raw = lib.keys_offset >= 0 && lib.dims_offset >= 0 && lib.dtype_offset >= 0 &&
              lib.device_offset >= 0;
}

/* The shim must agree with Python about every sample. */
static bool
verify_sample(PyObject *tensor, PyObject *described)
{
    void *handle = mj_torch_handle(&lib, tensor);
    int64_t n, *sizes, *strides;
    int32_t dtype;
    if (lib.dim(handle, &n) || lib.sizes(handle, &sizes) ||
        !same_ints(PyTuple_GET_ITEM(described, 3), sizes, n)) {
        return false;
    }
    PyObject *expected = PyTuple_GET_ITEM(described, 4);
    if (expected != Py_None &&
        (lib.strides(handle, &strides) || !same_ints(expected, strides, n))) {
        return false;
    }
    if (lib.dtype(handle, &dtype) ||
        (Py_ssize_t)lib.element_size(dtype) != PyLong_AsSsize_t(PyTuple_GET_ITEM(described, 5))) {
        return false;
    }
    bool wanted = PyTuple_GET_ITEM(described, 2) == Py_True;
    if (lib.requires_grad != NULL && lib.requires_grad(mj_torch_impl(&lib, tensor)) != wanted) {
        lib.requires_grad = NULL;
    }
    return true;
}

static int
take_names(PyObject *names)
{
    lib.tensor_type = (PyTypeObject *)Py_XNewRef(PyDict_GetItemString(names, "base"));
    lib.plain_types[0] = Py_XNewRef(PyDict_GetItemString(names, "tensor"));
    lib.plain_types[1] = Py_XNewRef(PyDict_GetItemString(names, "parameter"));
    lib.dispatch_keys = Py_XNewRef(PyDict_GetItemString(names, "dispatch_keys"));
    lib.refused_keys = PyLong_AsUnsignedLongLongMask(PyDict_GetItemString(names, "refused"));
    PyObject *descr = _PyType_Lookup(lib.tensor_type, PyUnicode_InternFromString("requires_grad"));
    if (descr != NULL && Py_IS_TYPE(descr, &PyGetSetDescr_Type)) {
        lib.requires_grad_getset = ((PyGetSetDescrObject *)descr)->d_getset;
    }
    mj_value_set_torch_types((PyTypeObject *)PyDict_GetItemString(names, "device"),
                             (PyTypeObject *)PyDict_GetItemString(names, "size"));
    return PyErr_Occurred() ? -1 : 0;
}

static int
measure(PyObject *names)
{
    PyObject *samples = PyDict_GetItemString(names, "samples");
    PyObject *described = PyDict_GetItemString(names, "described");
    if (take_names(names) < 0) {
        return -1;
    }
    if (!find_tensor_offset(samples, described)) {
        PyErr_SetString(PyExc_RuntimeError, "the layout of this torch's tensors is not known");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(samples); i++) {
        if (!verify_sample(PyList_GET_ITEM(samples, i), PyList_GET_ITEM(described, i))) {
            PyErr_Format(PyExc_RuntimeError,
                         "torch's C shim disagrees with Python about sample tensor %zd", i);
            return -1;
        }
    }
    find_impl_offsets(samples, described);
    return 0;
}

static int
bind(PyObject *torch)
{
    if (find_symbols(torch) < 0) {
        return -1;
    }
    PyObject *names = PyDict_New();
    if (names == NULL || PyDict_SetItemString(names, "__builtins__", PyEval_GetBuiltins()) < 0) {
        Py_XDECREF(names);
        return -1;
    }
    PyObject *result = PyRun_String(sample_source, Py_file_input, names, names);
    int status = result != NULL ? measure(names) : -1;
    Py_XDECREF(result);
    PyDict_Clear(names);
    Py_DECREF(names);
    return status;
}

/* ---- access ---- */

const torch_lib *
mj_torch(void)
{
    return state == BOUND ? &lib : NULL;
}

const torch_lib *
mj_torch_bind(void)
{
    if (state == BOUND) {
        return &lib;
    }
    PyObject *modules = PyImport_GetModuleDict();
    PyObject *torch = PyDict_GetItemString(modules, "torch");
    if (torch == NULL || state == FAILED) {
        PyErr_SetString(PyExc_RuntimeError,
                        torch == NULL ? "torch is not imported" : "this torch could not be bound");
        return NULL;
    }
    if (bind(torch) < 0) {
        state = FAILED;
        return NULL;
    }
    state = BOUND;
    return &lib;
}
