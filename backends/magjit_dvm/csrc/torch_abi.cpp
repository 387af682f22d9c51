#include "torch_abi.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <optional>

namespace magjit_dvm {

TorchLibrary torch_library;

namespace {

/* torch's function for a GPU's memory, which its dispatcher would come to in the end, and what it
 * takes and gives by value, as far as the calling convention goes. */
struct Lengths {
    const int64_t *first;
    size_t n;
};
struct Place {
    int8_t type, index;
};
struct Returned { /* a tensor: the pointer is owned */
    void *impl;
    ~Returned() {} /* not trivial, as a tensor's: it is returned in the caller's memory */
};
using EmptyOnGpu = Returned (*)(Lengths, Lengths, int8_t, std::optional<Place>);
constexpr char EMPTY_ON_GPU[] =
    "_ZN2at6detail18empty_strided_cudaEN3c108ArrayRefIlEES3_NS1_10ScalarTypeESt8optionalINS1_"
    "6DeviceEE";

/* It comes with a library that is there once somebody has used a GPU. */
EmptyOnGpu find_empty_on_gpu()
{
    static EmptyOnGpu found;
    static bool asked;
    if (!asked) {
        asked = true;
        void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        found = library ? (EmptyOnGpu)dlsym(library, EMPTY_ON_GPU) : nullptr;
    }
    return found;
}

/* A handle as `empty_strided` gives it; NULL where torch refuses, or has no such function. */
void *empty_on_gpu(Lengths sizes, Lengths strides, int32_t dtype, int32_t device)
{
    EmptyOnGpu make = find_empty_on_gpu();
    if (!make) {
        return nullptr;
    }
    try {
        Place place{(int8_t)torch_library.cuda, (int8_t)device};
        Returned made = make(sizes, strides, (int8_t)dtype, place);
        return new void *(made.impl);
    } catch (...) { /* the dispatcher's way is tried then */
        return nullptr;
    }
}

int missing(const char *name)
{
    PyErr_Format(PyExc_ImportError, "this torch does not export %s", name);
    return -1;
}

/* From this size on the kernel is asked for huge pages: a fresh output costs a page fault for each
 * page that is written, more than the writing itself. */
constexpr size_t HUGE_FROM = (size_t)4 << 20, HUGE_PAGE = (size_t)2 << 20;

void advise(char *data, size_t bytes)
{
    if (bytes < HUGE_FROM) {
        return;
    }
    uintptr_t first = ((uintptr_t)data + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    uintptr_t last = ((uintptr_t)data + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (last > first) {
        (void)madvise((void *)first, last - first, MADV_HUGEPAGE);
    }
}

} // namespace

int bind_torch(PyObject *example, unsigned long long impl, PyObject *tensor, PyObject *parameter,
               PyObject *steal)
{
    TorchLibrary &lib = torch_library;
    void *cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    void *python = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!cpu) {
        return missing("libtorch_cpu.so");
    }
#define FIND(FIELD, NAME)                                                                          \
    lib.FIELD = (decltype(lib.FIELD))dlsym(cpu, NAME);                                             \
    if (!lib.FIELD) {                                                                              \
        return missing(NAME);                                                                      \
    }
    FIND(get_dim, "aoti_torch_get_dim")
    FIND(get_sizes, "aoti_torch_get_sizes")
    FIND(get_strides, "aoti_torch_get_strides")
    FIND(get_data, "aoti_torch_get_data_ptr")
    FIND(get_dtype, "aoti_torch_get_dtype")
    FIND(get_device_type, "aoti_torch_get_device_type")
    FIND(get_device_index, "aoti_torch_get_device_index")
    FIND(get_layout, "aoti_torch_get_layout")
    FIND(empty_strided, "aoti_torch_empty_strided")
    FIND(delete_tensor, "aoti_torch_delete_tensor_object")
#undef FIND
    static const char *const names[N_DTYPES] = {
        "aoti_torch_dtype_float32", "aoti_torch_dtype_float64", "aoti_torch_dtype_int64",
        "aoti_torch_dtype_int32",   "aoti_torch_dtype_uint8",   "aoti_torch_dtype_bool",
        "aoti_torch_dtype_float16", "aoti_torch_dtype_bfloat16"};
    for (int i = 0; i < N_DTYPES; i++) {
        auto number = (int32_t(*)())dlsym(cpu, names[i]);
        if (!number) {
            return missing(names[i]);
        }
        lib.dtypes[i] = number();
    }
    auto device = (int32_t(*)())dlsym(cpu, "aoti_torch_device_type_cpu");
    auto gpu = (int32_t(*)())dlsym(cpu, "aoti_torch_device_type_cuda");
    if (!device || !gpu) {
        return missing("aoti_torch_device_type_cpu");
    }
    lib.cpu = device();
    lib.cuda = gpu();
    lib.is_negative =
        (decltype(lib.is_negative))dlsym(cpu, "_ZN2at4_ops6is_neg4callERKNS_6TensorE");
    lib.wrap = python ? (decltype(lib.wrap))dlsym(python, "_Z16THPVariable_WrapRKN2at10TensorBaseE")
                      : nullptr;
    lib.num_threads = (decltype(lib.num_threads))dlsym(cpu, "_ZN2at15get_num_threadsEv");
    lib.max_threads = lib.num_threads ? (decltype(lib.max_threads))dlsym(cpu, "omp_get_max_threads")
                                      : nullptr;
    lib.reinterpret =
        (decltype(lib.reinterpret))dlsym(cpu, "aoti_torch__reinterpret_tensor");
    lib.offset = 0;
    Py_ssize_t size = Py_TYPE(example)->tp_basicsize;
    for (Py_ssize_t at = sizeof(PyObject); at + 8 <= size; at += 8) {
        unsigned long long word;
        memcpy(&word, (char *)example + at, 8);
        if (word == impl) {
            lib.offset = at;
            break;
        }
    }
    if (!lib.offset) {
        return missing("a tensor at a known place in its Python object");
    }
    if (lib.get_layout(tensor_handle(example), &lib.strided)) {
        return missing("the layout of a tensor");
    }
    Py_XSETREF(lib.tensor, (PyTypeObject *)Py_NewRef(tensor));
    Py_XSETREF(lib.parameter, (PyTypeObject *)Py_NewRef(parameter));
    Py_XSETREF(lib.steal, Py_NewRef(steal));
    return 0;
}

PyObject *wrapped(void *handle)
{
    const TorchLibrary &lib = torch_library;
    if (lib.wrap) {
        PyObject *made = lib.wrap(handle);
        lib.delete_tensor(handle);
        return made;
    }
    PyObject *number = PyLong_FromVoidPtr(handle);
    PyObject *made = number ? PyObject_CallOneArg(lib.steal, number) : nullptr;
    Py_XDECREF(number);
    return made;
}

PyObject *empty_tensor(int ndim, const int64_t *sizes, const int64_t *strides, DType dtype,
                       int32_t device_type, int32_t device, char **data)
{
    const TorchLibrary &lib = torch_library;
    void *handle = nullptr, *address = nullptr;
    if (device_type == lib.cuda) {
        handle = empty_on_gpu({sizes, (size_t)ndim}, {strides, (size_t)ndim}, lib.dtypes[dtype],
                              device);
    }
    if (!handle && lib.empty_strided(ndim, sizes, strides, lib.dtypes[dtype], device_type, device,
                                     &handle)) {
        return nullptr;
    }
    if (lib.get_data(handle, &address)) {
        lib.delete_tensor(handle);
        return nullptr;
    }
    *data = (char *)address;
    return wrapped(handle);
}

PyObject *new_tensor(int ndim, const int64_t *sizes, const int64_t *strides, DType dtype,
                     char **data)
{
    PyObject *made = empty_tensor(ndim, sizes, strides, dtype, torch_library.cpu, 0, data);
    if (!made) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_MemoryError, "an output of a fused operator cannot be allocated");
        }
        return nullptr;
    }
    size_t bytes = DTYPE_BYTES[dtype];
    for (int i = 0; i < ndim; i++) {
        bytes *= (size_t)sizes[i];
    }
    advise(*data, bytes);
    return made;
}

int is_negative(PyObject *tensor)
{
    if (torch_library.is_negative) {
        try {
            return torch_library.is_negative(tensor_handle(tensor));
        } catch (...) { /* by a mode of Python that sees operators, say */
            return -1;
        }
    }
    PyObject *found = PyObject_CallMethod(tensor, "is_neg", nullptr);
    int negative = found ? PyObject_IsTrue(found) : -1;
    Py_XDECREF(found);
    return negative;
}

} // namespace magjit_dvm
