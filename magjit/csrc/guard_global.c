/* Global state of torch that decides which graph a program would have: what it consists of, and how
 * each entry is read.
 *
 * By an exported function of torch's libraries where there is one (1 to 3 ns), else by a function
 * of torch._C, called directly through its method definition, or it is a variable of a module.
 * Nothing here runs user code.
 */
#include "guard_state.h"

#define CONTEXT_PREFIX "_ZNK2at7Context"
#define CONTEXT(name, symbol, attribute) \
    {name, K_BYTE, CONTEXT_PREFIX symbol "Ev", "torch._C", attribute}
#define CALL(name, attribute) {name, K_CALL, NULL, "torch._C", attribute}
#define VARIABLE(name, module, attribute) {name, K_VARIABLE, NULL, module, attribute}
#define PRECISION_SYMBOL "_ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE"
#define PRECISION(name, backend, op) {name, K_PRECISION, PRECISION_SYMBOL, NULL, NULL, backend, op}
#define AUTOCAST(name, device) {name, K_AUTOCAST, NULL, NULL, NULL, device}

enum { CPU = 0, CUDA = 1 };                      /* c10::DeviceType */
enum { BACKEND_CUDA = 1, BACKEND_MKLDNN = 2 };   /* at::Float32Backend */
enum { OP_CONV = 1, OP_RNN = 2, OP_MATMUL = 3 }; /* at::Float32Op */

/* In the order in which they are most likely to differ. */
static entry entries[] = {
    {"grad_mode", K_BYTE, "aoti_torch_grad_mode_is_enabled", "torch._C", "is_grad_enabled"},
    {"inference_mode", K_BYTE, "_ZN3c1013InferenceMode10is_enabledEv", "torch._C",
     "is_inference_mode_enabled"},
    AUTOCAST("autocast_cpu", CPU),
    AUTOCAST("autocast_cuda", CUDA),
    {"function_modes", K_STACK, "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", "torch._C",
     "_get_function_stack_at"},
    {"dispatch_modes", K_STACK, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", "torch._C",
     "_get_dispatch_stack_at"},
    {"functorch_level", K_LEVEL, NULL, "torch._C._functorch", "maybe_current_level"},
    {"jit_tracing", K_TLS_KEY, NULL, "torch._C", "_is_tracing"},
    {"autocast_cache", K_BYTE, "_ZN2at8autocast25is_autocast_cache_enabledEv", "torch._C",
     "is_autocast_cache_enabled"},
    {"default_dtype", K_CALL, "_ZN3c1031get_default_dtype_as_scalartypeEv", "torch._C",
     "get_default_dtype"},
    {"num_threads", K_INT, "_ZN2at15get_num_threadsEv", "torch._C", "get_num_threads"},
    CONTEXT("deterministic", "23deterministicAlgorithms", "_get_deterministic_algorithms"),
    CONTEXT("deterministic_warn_only", "31deterministicAlgorithmsWarnOnly",
            "_get_deterministic_algorithms_warn_only"),
    CONTEXT("deterministic_fill", "36deterministicFillUninitializedMemory",
            "_get_deterministic_fill_uninitialized_memory"),
    PRECISION("precision_cuda_matmul", BACKEND_CUDA, OP_MATMUL),
    PRECISION("precision_cuda_conv", BACKEND_CUDA, OP_CONV),
    PRECISION("precision_cuda_rnn", BACKEND_CUDA, OP_RNN),
    PRECISION("precision_mkldnn_matmul", BACKEND_MKLDNN, OP_MATMUL),
    PRECISION("precision_mkldnn_conv", BACKEND_MKLDNN, OP_CONV),
    PRECISION("precision_mkldnn_rnn", BACKEND_MKLDNN, OP_RNN),
    CALL("matmul_precision",
         "_get_float32_matmul_precision"), /* these two only without PRECISION */
    CALL("cudnn_tf32", "_get_cudnn_allow_tf32"),
    CONTEXT("fp16_reduction", "24allowFP16ReductionCuBLAS",
            "_get_cublas_allow_fp16_reduced_precision_reduction"),
    CONTEXT("bf16_reduction", "24allowBF16ReductionCuBLAS",
            "_get_cublas_allow_bf16_reduced_precision_reduction"),
    CONTEXT("fp16_accumulation", "27allowFP16AccumulationCuBLAS",
            "_get_cublas_allow_fp16_accumulation"),
    CONTEXT("cudnn_enabled", "16userEnabledCuDNN", "_get_cudnn_enabled"),
    CONTEXT("cudnn_benchmark", "14benchmarkCuDNN", "_get_cudnn_benchmark"),
    CONTEXT("cudnn_deterministic", "18deterministicCuDNN", "_get_cudnn_deterministic"),
    CONTEXT("mkldnn_enabled", "17userEnabledMkldnn", "_get_mkldnn_enabled"),
    CONTEXT("mkldnn_deterministic", "19deterministicMkldnn", "_get_mkldnn_deterministic"),
    CONTEXT("sdp_flash", "19userEnabledFlashSDP", "_get_flash_sdp_enabled"),
    CONTEXT("sdp_efficient", "26userEnabledMemEfficientSDP", "_get_mem_efficient_sdp_enabled"),
    CONTEXT("sdp_math", "18userEnabledMathSDP", "_get_math_sdp_enabled"),
    CONTEXT("sdp_cudnn", "19userEnabledCuDNNSDP", "_get_cudnn_sdp_enabled"),
    CONTEXT("sdp_math_reduction", "29allowFP16BF16ReductionMathSDP",
            "_get_math_sdp_allow_fp16_bf16_reduction"),
    CALL("function_enabled", "_is_torch_function_enabled"),
    CALL("function_all_disabled", "_is_torch_function_all_disabled"),
    CALL("forward_ad", "_is_fwd_grad_enabled"),
    {"anomaly_mode", K_FLAG, "_ZN5torch8autograd11AnomalyMode8_enabledE", "torch._C",
     "is_anomaly_enabled"},
    VARIABLE("forward_ad_level", "torch.autograd.forward_ad", "_current_level"),
    VARIABLE("compiling", "torch.compiler", "_is_compiling_flag"),
    VARIABLE("exporting", "torch.compiler", "_is_exporting_flag"),
};

enum { N_ENTRIES = sizeof(entries) / sizeof(entries[0]) };

const entry *const mj_entries = entries;
const int mj_n_entries = N_ENTRIES;
PyObject *mj_device_context_type;

state_library mj_state_library;
static state_library *const torch = &mj_state_library;

/* ---- readers ---- */

static PyObject *
call_function(PyObject *function)
{
    if (PyCFunction_GET_FLAGS(function) == METH_NOARGS) {
        return ((PyCFunctionObject *)function)->m_ml->ml_meth(PyCFunction_GET_SELF(function), NULL);
    }
    return PyObject_CallNoArgs(function);
}

static PyObject *
read_stack(const entry *e)
{
    int64_t n = ((int64_t (*)(void))e->function)();
    PyObject *modes = PyTuple_New((Py_ssize_t)n);
    for (Py_ssize_t i = 0; modes != NULL && i < n; i++) {
        PyObject *index = PyLong_FromSsize_t(i);
        PyObject *mode = index != NULL ? PyObject_CallOneArg(e->object, index) : NULL;
        Py_XDECREF(index);
        if (mode == NULL) {
            Py_CLEAR(modes);
            break;
        }
        PyTuple_SET_ITEM(modes, i, mode);
    }
    return modes;
}

bool
mj_entry_stack_is_empty(const entry *e)
{
    return ((int64_t (*)(void))e->function)() == 0;
}

PyObject *
mj_entry_value(const entry *e)
{
    PyObject *value = NULL;
    if (e->kind == K_VARIABLE) {
        return mj_dict_get(e->object, e->key, e->hash, &value) == V_YES ? Py_NewRef(value) : NULL;
    }
    if (e->kind == K_LEVEL && torch->key_included != NULL &&
        !torch->key_included((uint16_t)torch->functorch_key)) {
        return Py_NewRef(Py_None);
    }
    /* Tuples may be made below, and a collection could run finalisers. */
    int gc = PyGC_Disable();
    value = e->kind == K_STACK ? read_stack(e) : call_function(e->object);
    if (value == NULL) {
        PyErr_Clear();
    }
    if (gc) {
        PyGC_Enable();
    }
    return value;
}

/* ---- preparation ---- */

static PyObject *
attribute_of(const char *module, const char *attribute)
{
    PyObject *name = PyUnicode_FromString(module),
             *m = name != NULL ? PyImport_GetModule(name) : NULL;
    PyObject *value = m != NULL ? PyObject_GetAttrString(m, attribute) : NULL;
    Py_XDECREF(m);
    Py_XDECREF(name);
    PyErr_Clear();
    return value;
}

static void
prepare_variable(entry *e)
{
    e->object = attribute_of(e->module, "__dict__");
    e->key = PyUnicode_InternFromString(e->attribute);
    e->hash = e->key != NULL ? PyObject_Hash(e->key) : -1;
    e->present = e->object != NULL && PyDict_Check(e->object);
}

/* An exported function is used if it says what Python says. */
static void
prepare_function(entry *e)
{
    e->object = e->attribute != NULL ? attribute_of(e->module, e->attribute) : NULL;
    if (e->kind == K_TLS_KEY) {
        e->function =
            torch->key_included != NULL && torch->tracer_key >= 0 ? torch->key_included : NULL;
    }
    else {
        bool method = e->symbol != NULL &&
                      strncmp(e->symbol, CONTEXT_PREFIX, sizeof(CONTEXT_PREFIX) - 1) == 0;
        bool usable = e->symbol != NULL && (!method || torch->context != NULL);
        e->function = usable ? mj_torch_symbol(e->symbol) : NULL;
    }
    bool callable = e->object != NULL && PyCFunction_CheckExact(e->object);
    if (e->kind == K_STACK) {
        e->present = e->function != NULL && e->object != NULL;
        return;
    }
    if (e->function != NULL && callable && e->kind < K_CALL) {
        PyObject *value = call_function(e->object);
        if (value != NULL && PyLong_Check(value) &&
            PyLong_AsLongLong(value) != mj_entry_number(e)) {
            e->function = NULL;
        }
        Py_XDECREF(value);
        PyErr_Clear();
    }
    e->present = callable || (e->function != NULL && e->kind != K_CALL);
}

static int
key_number(const char *name)
{
    PyObject *parse = attribute_of("torch._C", "_dispatch_key_parse");
    PyObject *key = parse != NULL ? PyObject_CallFunction(parse, "s", name) : NULL;
    PyObject *number = key != NULL ? PyNumber_Long(key) : NULL;
    long value = number != NULL ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    Py_XDECREF(key);
    Py_XDECREF(parse);
    PyErr_Clear();
    return (int)value;
}

static void
prepare_autocast(entry *e)
{
    e->present = torch->autocast_enabled != NULL && torch->autocast_dtype != NULL;
}

static void
prepare_library(void)
{
    void *(*context)(void) = (void *(*)(void))mj_torch_symbol("_ZN2at13globalContextEv");
    torch->context = context != NULL ? context() : NULL;
    *(void **)&torch->autocast_enabled =
        mj_torch_symbol("_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE");
    *(void **)&torch->autocast_dtype =
        mj_torch_symbol("_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE");
    *(void **)&torch->key_included =
        mj_torch_symbol("_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE");
    torch->tracer_key = key_number("Tracer");
    torch->functorch_key = key_number("FuncTorchDynamicLayerFrontMode");
    if (torch->functorch_key < 0) {
        torch->key_included = NULL;
    }
    mj_device_context_type = attribute_of("torch.utils._device", "DeviceContext");
}

static const char *const required[] = {"grad_mode",       "inference_mode", "autocast_cpu",
                                       "autocast_cuda",   "function_modes", "dispatch_modes",
                                       "functorch_level", "default_dtype"};

static bool
is_present(const char *name)
{
    for (int i = 0; i < N_ENTRIES; i++) {
        if (strcmp(entries[i].name, name) == 0) {
            return entries[i].present;
        }
    }
    return false;
}

int
mj_entries_prepare(void)
{
    if (mj_torch_bind() == NULL) {
        return -1;
    }
    if (torch->ready) {
        return 0;
    }
    prepare_library();
    bool precision = torch->context != NULL && mj_torch_symbol(PRECISION_SYMBOL) != NULL;
    for (int i = 0; i < N_ENTRIES; i++) {
        entry *e = &entries[i];
        if (e->kind == K_VARIABLE) {
            prepare_variable(e);
        }
        else if (e->kind == K_AUTOCAST) {
            prepare_autocast(e);
        }
        else {
            prepare_function(e);
        }
        bool superseded =
            strcmp(e->name, "matmul_precision") == 0 || strcmp(e->name, "cudnn_tf32") == 0;
        e->present = e->present && !(precision && superseded);
    }
    for (size_t i = 0; i < sizeof(required) / sizeof(required[0]); i++) {
        if (!is_present(required[i])) {
            PyErr_Format(PyExc_RuntimeError, "this torch does not show its state '%s'",
                         required[i]);
            return -1;
        }
    }
    torch->ready = true;
    return 0;
}
