/* Launches on NVIDIA GPUs: the driver by dlopen, so that neither building nor importing needs it. */
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>

#include "cuda_launch.h"

namespace magjit_dvm {

namespace {

/* The few functions of the driver's interface (cuda.h) that are used; all of them are old and stable. */
using Result = int;
constexpr Result SUCCESS = 0, INVALID_VALUE = 1, NOT_SUPPORTED = 801;
void *const BUFFER_POINTER = (void *)1, *const BUFFER_SIZE = (void *)2; /* CU_LAUNCH_PARAM_… */
constexpr int MAX_DYNAMIC_SHARED = 8; /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */

/* CUlaunchAttribute and CUlaunchConfig. */
constexpr int OVERLAPS = 6; /* CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION */
struct Attribute {
    int which;
    char unused[4];
    union {
        int allowed;
        char whole[64];
    };
};
struct Config {
    unsigned blocks[3], threads[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned n_attributes;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Config) == 56, "as the driver has them");

struct Driver {
    Result (*error_name)(Result, const char **);
    Result (*error_string)(Result, const char **);
    Result (*primary_context)(void **, int);
    Result (*current_context)(void **);
    Result (*set_context)(void *);
    Result (*module_load)(void **, const void *);
    Result (*module_function)(void **, void *, const char *);
    Result (*function_attribute)(void *, int, int);
    Result (*is_capturing)(void *, int *);
    Result (*exchange_capture_mode)(int *);
    Result (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     void *, void **, void **);
    Result (*launch_with)(const Config *, void *, void **, void **); /* none before CUDA 11.8 */
};

Driver driver;
bool loaded = false;
PyObject *device_error;

/* As words.py packs them. */
enum : int { IMAGE_BYTES = 4096, COUNTER_AT = 144 };
enum : int { COUNTER_BYTES = 8 };
struct Patch {
    uint32_t at, argument;
    int64_t offset;
};
static_assert(sizeof(Patch) == 16, "as words.py packs it");

int load_driver()
{
    if (loaded) {
        return 0;
    }
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        PyErr_Format(device_error, "no NVIDIA driver here: %s; run on the CPU instead", dlerror());
        return -1;
    }
#define FIND(FIELD, NAME)                                                                          \
    driver.FIELD = (decltype(driver.FIELD))dlsym(library, NAME);                                   \
    if (!driver.FIELD) {                                                                           \
        PyErr_Format(device_error, "this NVIDIA driver lacks %s; a newer one has it", NAME);       \
        return -1;                                                                                 \
    }
    FIND(error_name, "cuGetErrorName")
    FIND(error_string, "cuGetErrorString")
    FIND(primary_context, "cuDevicePrimaryCtxRetain")
    FIND(current_context, "cuCtxGetCurrent")
    FIND(set_context, "cuCtxSetCurrent")
    FIND(module_load, "cuModuleLoadData")
    FIND(module_function, "cuModuleGetFunction")
    FIND(function_attribute, "cuFuncSetAttribute")
    FIND(is_capturing, "cuStreamIsCapturing")
    FIND(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode")
    FIND(launch, "cuLaunchKernel")
#undef FIND
    driver.launch_with = (decltype(driver.launch_with))dlsym(library, "cuLaunchKernelEx");
    loaded = true;
    return 0;
}

int failed(Result result, const char *what)
{
    if (result == SUCCESS) {
        return 0;
    }
    const char *name = nullptr, *text = nullptr;
    driver.error_name(result, &name);
    driver.error_string(result, &text);
    PyErr_Format(device_error, "%s: %s (%s, %d)", what, text ? text : "an unknown error",
                 name ? name : "?", result);
    return -1;
}

/* Of each kernel, the context that it was loaded into: torch's own, the device's primary one; and
 * whether it knows how to begin before the launch in front of it has ended. */
struct Kernel {
    void *context;
    bool overlaps;
};
std::map<uint64_t, Kernel> *kernels;

/* A context is the current one for as long as this lives: a thread that has not used torch's runtime
 * yet has none, and another device may be the current one. */
class ContextGuard {
public:
    Result enter(void *context)
    {
        Result result = driver.current_context(&before);
        changed = result == SUCCESS && context && before != context;
        return changed ? driver.set_context(context) : result;
    }
    ~ContextGuard()
    {
        if (changed && before) {
            driver.set_context(before);
        }
    }

private:
    void *before = nullptr;
    bool changed = false;
};

/* While it lives, what this thread does is forbidden by no capture, here or in another thread: a module
 * that is loaded is no part of a graph. */
class RelaxedCapture {
public:
    RelaxedCapture() : result(driver.exchange_capture_mode(&mode)) {}
    ~RelaxedCapture()
    {
        if (result == SUCCESS) {
            driver.exchange_capture_mode(&mode);
        }
    }

private:
    int mode = 2; /* CU_STREAM_CAPTURE_MODE_RELAXED; then the one before */
    Result result;
};

/* The tile counter of a launch. Launches of one stream come after one another and leave zeros, so that
 * they share one. A captured launch has its own for good: a graph may be replayed beside anything. */
uint64_t counter_for(void *stream, uint64_t counters, uint64_t n_counters, Result &result)
{
    static std::map<std::pair<uint64_t, void *>, uint64_t> of_stream;
    static std::map<uint64_t, uint64_t> taken;
    int capturing = 0;
    result = driver.is_capturing(stream, &capturing);
    if (result != SUCCESS) {
        return 0;
    }
    uint64_t &next = taken[counters];
    auto known = of_stream.find({counters, stream});
    if (!capturing && known != of_stream.end()) {
        return counters + COUNTER_BYTES * known->second;
    }
    if (next >= n_counters) {
        return 0; /* tiles are shared out evenly then */
    }
    if (!capturing) {
        of_stream[{counters, stream}] = next;
    }
    return counters + COUNTER_BYTES * next++;
}

/* The driver's verdict on a launch. It copies a parameter from `parameter`, which has all bytes of it,
 * but may be told that there are fewer. */
Result try_launch(const Launch &one, bool in_part, bool overlaps)
{
    size_t n_bytes = (size_t)one.n_bytes;
    void *part[] = {BUFFER_POINTER, one.parameter, BUFFER_SIZE, &n_bytes, nullptr};
    void *whole[] = {one.parameter};
    void **parameters = in_part ? nullptr : whole, **buffer = in_part ? part : nullptr;
    if (!in_part) {
        memset(one.parameter + one.n_bytes, 0, (size_t)(IMAGE_BYTES - one.n_bytes));
    }
    if (!overlaps) {
        return driver.launch((void *)one.function, one.blocks, 1, 1, one.threads, 1, 1, one.shared,
                             one.stream, parameters, buffer);
    }
    Attribute attribute{OVERLAPS, {}, {1}};
    Config config{{one.blocks, 1, 1}, {one.threads, 1, 1}, one.shared, one.stream, &attribute, 1};
    return driver.launch_with(&config, (void *)one.function, parameters, buffer);
}

/* What a driver refuses it is not asked again. */
Result launch_kernel(const Launch &one, bool overlaps)
{
    static std::atomic<bool> refuses_part{false}, refuses_overlap{false};
    for (;;) {
        bool in_part = one.n_bytes < IMAGE_BYTES && !refuses_part.load(std::memory_order_relaxed);
        bool early = overlaps && driver.launch_with &&
                     !refuses_overlap.load(std::memory_order_relaxed);
        Result result = try_launch(one, in_part, early);
        if ((result != INVALID_VALUE && result != NOT_SUPPORTED) || (!in_part && !early)) {
            return result;
        }
        (early ? refuses_overlap : refuses_part).store(true, std::memory_order_relaxed);
    }
}

} // namespace

int launch(const Launch &one)
{
    if (load_driver()) {
        return -1;
    }
    auto found = kernels->find(one.function);
    Kernel kernel = found == kernels->end() ? Kernel{} : found->second;
    ContextGuard guard;
    if (failed(guard.enter(kernel.context), "cuCtxSetCurrent")) {
        return -1;
    }
    if (one.n_counters) {
        Result result;
        uint64_t counter = counter_for(one.stream, one.counters, one.n_counters, result);
        if (failed(result, "cuStreamIsCapturing")) {
            return -1;
        }
        memcpy(one.parameter + COUNTER_AT, &counter, sizeof(counter));
    }
    PyThreadState *state = PyEval_SaveThread(); /* it waits where too many launches are under way */
    Result result = launch_kernel(one, kernel.overlaps);
    PyEval_RestoreThread(state);
    return failed(result, "cuLaunchKernel");
}

int is_captured(void *stream)
{
    int capturing = 0;
    if (load_driver() || failed(driver.is_capturing(stream, &capturing), "cuStreamIsCapturing")) {
        return -1;
    }
    return capturing != 0;
}

PyObject *py_cuda_load(PyObject *, PyObject *args)
{
    const char *image, *name;
    Py_ssize_t n;
    int shared, device, overlaps;
    if (!PyArg_ParseTuple(args, "iy#sip:cuda_load", &device, &image, &n, &name, &shared,
                          &overlaps) ||
        load_driver()) {
        return nullptr;
    }
    void *context, *module, *function; /* for as long as the process lives */
    ContextGuard guard;
    RelaxedCapture relaxed;
    if (failed(driver.primary_context(&context, device), "cuDevicePrimaryCtxRetain") ||
        failed(guard.enter(context), "cuCtxSetCurrent") ||
        failed(driver.module_load(&module, image), "cuModuleLoadData") ||
        failed(driver.module_function(&function, module, name), "cuModuleGetFunction") ||
        failed(driver.function_attribute(function, MAX_DYNAMIC_SHARED, shared),
               "cuFuncSetAttribute")) {
        return nullptr;
    }
    (*kernels)[(uint64_t)function] = Kernel{context, overlaps != 0};
    return PyLong_FromVoidPtr(function);
}

PyObject *py_cuda_launch(PyObject *, PyObject *args)
{
    unsigned long long function, stream, counters, n_counters;
    unsigned blocks, threads, shared;
    const char *image, *patches;
    Py_ssize_t n, n_patches;
    PyObject *addresses;
    if (!PyArg_ParseTuple(args, "KIIIKy#y#O!KK:cuda_launch", &function, &blocks, &threads, &shared,
                          &stream, &image, &n, &patches, &n_patches, &PyTuple_Type, &addresses,
                          &counters, &n_counters) ||
        load_driver()) {
        return nullptr;
    }
    Py_ssize_t least = n_counters ? COUNTER_AT + COUNTER_BYTES : 1; /* parts of sums have no counter */
    if (n < least || n > IMAGE_BYTES || n_patches % (Py_ssize_t)sizeof(Patch)) {
        PyErr_SetString(PyExc_ValueError, "an image or patches of another length");
        return nullptr;
    }
    alignas(16) char parameter[IMAGE_BYTES]; /* the driver reads all of it */
    memcpy(parameter, image, (size_t)n);
    for (Py_ssize_t at = 0; at < n_patches; at += (Py_ssize_t)sizeof(Patch)) {
        Patch patch;
        memcpy(&patch, patches + at, sizeof(patch));
        if (patch.argument >= PyTuple_GET_SIZE(addresses) || patch.at + 8 > n) {
            PyErr_SetString(PyExc_ValueError, "a patch beyond its image, or of no argument");
            return nullptr;
        }
        PyObject *given = PyTuple_GET_ITEM(addresses, patch.argument);
        uint64_t address = PyLong_AsUnsignedLongLong(given);
        if (PyErr_Occurred()) {
            return nullptr;
        }
        address += (uint64_t)patch.offset;
        memcpy(parameter + patch.at, &address, sizeof(address));
    }
    if (launch({function, blocks, threads, shared, (void *)stream, parameter, (int)n, counters,
                n_counters})) {
        return nullptr;
    }
    Py_RETURN_NONE;
}

int add_cuda(PyObject *module)
{
    kernels = new std::map<uint64_t, Kernel>;
    device_error = PyErr_NewExceptionWithDoc("magjit_dvm._vm.DeviceError",
                                             "The GPU or its driver refused; it says why.",
                                             PyExc_RuntimeError, nullptr);
    return device_error ? PyModule_AddObjectRef(module, "DeviceError", device_error) : -1;
}

} // namespace magjit_dvm
