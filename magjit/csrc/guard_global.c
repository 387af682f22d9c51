/* Global state of torch that decides which graph a program would have.
 *
 *     state := {name: value}
 *
 * Each entry is read by a C function: an exported function of torch's libraries, or a function of torch._C called
 * directly through its method definition.  Nothing here runs user code; modes are compared by identity, except the
 * one of torch.device contexts, which is made anew for each `with` and compared by its device.
 */
#include "guard_torch.h"

typedef struct entry entry;
typedef PyObject *(*read_function)(const entry *e); /* new reference; NULL without exception: not known */
typedef int64_t (*read_int_function)(void);

struct entry {
    const char *name;
    read_function read;
    read_int_function read_int; /* instead of read */
    const char *module;         /* where the function or variable is, below torch */
    const char *attribute;
    PyObject *object; /* C function, or the dict that holds the variable */
    PyObject *key;
    Py_hash_t hash;
    bool present;
};

/* ---- readers ---- */

static PyObject *
read_call(const entry *e)
{
    PyCFunctionObject *f = (PyCFunctionObject *)e->object;
    PyObject *value;
    if (PyCFunction_GET_FLAGS(e->object) == METH_NOARGS) {
        value = f->m_ml->ml_meth(PyCFunction_GET_SELF(e->object), NULL);
    }
    else {
        value = PyObject_CallNoArgs(e->object);
    }
    if (value == NULL) {
        PyErr_Clear();
    }
    return value;
}

static PyObject *
read_variable(const entry *e)
{
    PyObject *value;
    return mj_dict_get(e->object, e->key, e->hash, &value) == V_YES ? Py_NewRef(value) : NULL;
}

static int64_t
read_grad_mode(void)
{
    return mj_torch()->grad_mode();
}

static int64_t
read_functorch(void)
{
    const torch_lib *lib = mj_torch();
    return lib->has_functorch_key ? lib->tls_key_included(lib->functorch_key) : -1;
}

enum { CPU = 0, CUDA = 1 };

static int64_t
autocast(int8_t device_type)
{
    const torch_lib *lib = mj_torch();
    if (lib->autocast_enabled == NULL || lib->autocast_dtype == NULL) {
        return -2;
    }
    return lib->autocast_enabled(device_type) ? lib->autocast_dtype(device_type) : -1;
}

static int64_t
read_autocast_cpu(void)
{
    return autocast(CPU);
}

static int64_t
read_autocast_cuda(void)
{
    return autocast(CUDA);
}

/* The modes of a stack as a tuple, innermost last. */
static PyObject *
read_stack(PyObject *length, PyObject *get)
{
    PyCFunctionObject *f = (PyCFunctionObject *)length;
    PyObject *n_object = f->m_ml->ml_meth(PyCFunction_GET_SELF(length), NULL);
    Py_ssize_t n = n_object != NULL ? PyLong_AsSsize_t(n_object) : -1;
    Py_XDECREF(n_object);
    PyObject *modes = n >= 0 ? PyTuple_New(n) : NULL;
    for (Py_ssize_t i = 0; modes != NULL && i < n; i++) {
        PyObject *index = PyLong_FromSsize_t(i);
        PyObject *mode = index != NULL ? PyObject_CallOneArg(get, index) : NULL;
        Py_XDECREF(index);
        if (mode == NULL) {
            Py_CLEAR(modes);
            break;
        }
        PyTuple_SET_ITEM(modes, i, mode);
    }
    PyErr_Clear();
    return modes;
}

static PyObject *function_length, *function_at, *dispatch_length, *dispatch_at, *device_context_type, *device_name;
static PyObject *functorch_level;
static Py_hash_t device_hash;

static PyObject *
read_function_modes(const entry *e)
{
    return function_length != NULL && function_at != NULL ? read_stack(function_length, function_at) : NULL;
}

static PyObject *
read_dispatch_modes(const entry *e)
{
    return dispatch_length != NULL && dispatch_at != NULL ? read_stack(dispatch_length, dispatch_at) : NULL;
}

/* The level of vmap, grad and their kin; asked only while one is active. */
static PyObject *
read_functorch_level(const entry *e)
{
    if (functorch_level == NULL || read_functorch() == 0) {
        return Py_NewRef(Py_None);
    }
    PyObject *value = PyObject_CallNoArgs(functorch_level);
    PyErr_Clear();
    return value;
}

/* ---- the table ---- */

#define FLAG(name, attribute) {name, read_call, NULL, "torch._C", attribute}
#define VARIABLE(name, module, attribute) {name, read_variable, NULL, module, attribute}

static entry entries[] = {
    {"grad_mode", NULL, read_grad_mode},
    FLAG("inference_mode", "is_inference_mode_enabled"),
    {"autocast_cpu", NULL, read_autocast_cpu},
    {"autocast_cuda", NULL, read_autocast_cuda},
    {"function_modes", read_function_modes},
    {"dispatch_modes", read_dispatch_modes},
    {"functorch_level", read_functorch_level},
    FLAG("autocast_cache", "is_autocast_cache_enabled"),
    FLAG("default_dtype", "get_default_dtype"),
    FLAG("num_threads", "get_num_threads"),
    FLAG("deterministic", "_get_deterministic_algorithms"),
    FLAG("deterministic_warn_only", "_get_deterministic_algorithms_warn_only"),
    FLAG("deterministic_fill", "_get_deterministic_fill_uninitialized_memory"),
    FLAG("matmul_precision", "_get_float32_matmul_precision"),
    FLAG("cublas_tf32", "_get_cublas_allow_tf32"),
    FLAG("cublas_fp16_reduction", "_get_cublas_allow_fp16_reduced_precision_reduction"),
    FLAG("cublas_bf16_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction"),
    FLAG("cublas_fp16_accumulation", "_get_cublas_allow_fp16_accumulation"),
    FLAG("cudnn_enabled", "_get_cudnn_enabled"),
    FLAG("cudnn_tf32", "_get_cudnn_allow_tf32"),
    FLAG("cudnn_benchmark", "_get_cudnn_benchmark"),
    FLAG("cudnn_deterministic", "_get_cudnn_deterministic"),
    FLAG("mkldnn_enabled", "_get_mkldnn_enabled"),
    FLAG("sdp_flash", "_get_flash_sdp_enabled"),
    FLAG("sdp_efficient", "_get_mem_efficient_sdp_enabled"),
    FLAG("sdp_math", "_get_math_sdp_enabled"),
    FLAG("sdp_cudnn", "_get_cudnn_sdp_enabled"),
    FLAG("function_enabled", "_is_torch_function_enabled"),
    FLAG("function_all_disabled", "_is_torch_function_all_disabled"),
    FLAG("forward_ad", "_is_fwd_grad_enabled"),
    FLAG("anomaly_mode", "is_anomaly_enabled"),
    FLAG("jit_tracing", "_is_tracing"),
    VARIABLE("forward_ad_level", "torch.autograd.forward_ad", "_current_level"),
    VARIABLE("compiling", "torch.compiler", "_is_compiling_flag"),
    VARIABLE("exporting", "torch.compiler", "_is_exporting_flag"),
};

enum { N_ENTRIES = sizeof(entries) / sizeof(entries[0]) };

struct global_state {
    bool used[N_ENTRIES];
    int64_t number[N_ENTRIES];
    PyObject *value[N_ENTRIES]; /* NULL: not known then */
};

static bool tables_ready;

static PyObject *
attribute_of(const char *module, const char *attribute)
{
    PyObject *m = PyImport_GetModule(PyUnicode_InternFromString(module));
    PyObject *value = m != NULL ? PyObject_GetAttrString(m, attribute) : NULL;
    Py_XDECREF(m);
    PyErr_Clear();
    return value;
}

static void
prepare_entry(entry *e)
{
    e->present = true;
    if (e->attribute == NULL) {
        return;
    }
    if (e->read == read_call) {
        e->object = attribute_of(e->module, e->attribute);
        e->present = e->object != NULL && PyCFunction_CheckExact(e->object);
        return;
    }
    PyObject *m = PyImport_GetModule(PyUnicode_InternFromString(e->module));
    e->key = PyUnicode_InternFromString(e->attribute);
    e->hash = PyObject_Hash(e->key);
    e->object = m != NULL && PyModule_Check(m) ? Py_NewRef(PyModule_GetDict(m)) : NULL;
    e->present = e->object != NULL;
    Py_XDECREF(m);
}

static bool
noargs(PyObject *f)
{
    return f != NULL && PyCFunction_CheckExact(f) && PyCFunction_GET_FLAGS(f) == METH_NOARGS;
}

/* Once torch is there; -1 with an exception if it is not. */
static int
prepare(void)
{
    if (mj_torch_bind() == NULL) {
        return -1;
    }
    if (tables_ready) {
        return 0;
    }
    for (int i = 0; i < N_ENTRIES; i++) {
        prepare_entry(&entries[i]);
    }
    function_length = attribute_of("torch._C", "_len_torch_function_stack");
    function_at = attribute_of("torch._C", "_get_function_stack_at");
    dispatch_length = attribute_of("torch._C", "_len_torch_dispatch_stack");
    dispatch_at = attribute_of("torch._C", "_get_dispatch_stack_at");
    functorch_level = attribute_of("torch._C._functorch", "maybe_current_level");
    device_context_type = attribute_of("torch.utils._device", "DeviceContext");
    device_name = PyUnicode_InternFromString("device");
    if (!noargs(function_length) || !noargs(dispatch_length) || function_at == NULL || dispatch_at == NULL ||
        device_name == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this torch does not show its stacks of modes");
        return -1;
    }
    device_hash = PyObject_Hash(device_name);
    tables_ready = true;
    return 0;
}

/* ---- comparison ---- */

static bool
same_mode(PyObject *a, PyObject *b)
{
    if (a == b) {
        return true;
    }
    if ((PyObject *)Py_TYPE(a) != device_context_type || Py_TYPE(a) != Py_TYPE(b)) {
        return false;
    }
    PyObject **da = _PyObject_GetDictPtr(a), **db = _PyObject_GetDictPtr(b), *x, *y;
    return da != NULL && db != NULL && *da != NULL && *db != NULL &&
           mj_dict_get(*da, device_name, device_hash, &x) == V_YES &&
           mj_dict_get(*db, device_name, device_hash, &y) == V_YES && mj_value_eq(x, y) == V_YES;
}

static bool
same_value(const entry *e, PyObject *expected, PyObject *now)
{
    if (expected == now) {
        return true;
    }
    if (expected == NULL || now == NULL) {
        return false;
    }
    if (e->read != read_function_modes && e->read != read_dispatch_modes) {
        return mj_value_eq(expected, now) == V_YES;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(expected);
    if (n != PyTuple_GET_SIZE(now)) {
        return false;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!same_mode(PyTuple_GET_ITEM(expected, i), PyTuple_GET_ITEM(now, i))) {
            return false;
        }
    }
    return true;
}

bool
mj_state_check(const global_state *state)
{
    for (int i = 0; i < N_ENTRIES; i++) {
        const entry *e = &entries[i];
        if (!state->used[i]) {
            continue;
        }
        if (e->read_int != NULL) {
            if (e->read_int() != state->number[i]) {
                return false;
            }
            continue;
        }
        PyObject *now = e->read(e);
        bool same = same_value(e, state->value[i], now);
        Py_XDECREF(now);
        if (!same) {
            return false;
        }
    }
    return true;
}

/* ---- capture, and to and from dicts ---- */

static void
capture(global_state *state)
{
    for (int i = 0; i < N_ENTRIES; i++) {
        const entry *e = &entries[i];
        state->used[i] = e->present;
        if (!e->present) {
            continue;
        }
        if (e->read_int != NULL) {
            state->number[i] = e->read_int();
        }
        else {
            state->value[i] = e->read(e);
        }
    }
}

static bool
parse_given(global_state *state, PyObject *given)
{
    Py_ssize_t known = 0;
    for (int i = 0; i < N_ENTRIES; i++) {
        PyObject *value = PyDict_GetItemString(given, entries[i].name);
        if (value == NULL) {
            continue;
        }
        known++;
        state->used[i] = entries[i].present;
        if (entries[i].read_int == NULL) {
            bool stack = entries[i].read == read_function_modes || entries[i].read == read_dispatch_modes;
            if (stack && !PyTuple_CheckExact(value)) {
                return false;
            }
            state->value[i] = value == mj_null ? NULL : Py_NewRef(value);
        }
        else if (PyLong_Check(value)) {
            state->number[i] = PyLong_AsLongLong(value);
        }
        else {
            return false;
        }
    }
    return known == PyDict_GET_SIZE(given);
}

global_state *
mj_state_parse(PyObject *given)
{
    if (prepare() < 0 || (given != NULL && !PyDict_CheckExact(given))) {
        return NULL;
    }
    global_state *state = PyMem_Calloc(1, sizeof(global_state));
    if (state == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (given == NULL) {
        capture(state);
    }
    else if (!parse_given(state, given)) {
        mj_state_free(state);
        return NULL;
    }
    return state;
}

void
mj_state_free(global_state *state)
{
    for (int i = 0; state != NULL && i < N_ENTRIES; i++) {
        Py_XDECREF(state->value[i]);
    }
    PyMem_Free(state);
}

int
mj_state_traverse(global_state *state, visitproc visit, void *arg)
{
    for (int i = 0; state != NULL && i < N_ENTRIES; i++) {
        Py_VISIT(state->value[i]);
    }
    return 0;
}

static PyObject *
global_state_of(PyObject *module, PyObject *unused)
{
    global_state *state = mj_state_parse(NULL);
    PyObject *dict = state != NULL ? PyDict_New() : NULL;
    for (int i = 0; dict != NULL && i < N_ENTRIES; i++) {
        if (!state->used[i]) {
            continue;
        }
        PyObject *value = state->value[i];
        if (entries[i].read_int != NULL) {
            value = PyLong_FromLongLong(state->number[i]);
        }
        else {
            value = Py_NewRef(value != NULL ? value : mj_null);
        }
        if (value == NULL || PyDict_SetItemString(dict, entries[i].name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    mj_state_free(state);
    return dict;
}

static PyMethodDef methods[] = {
    {"global_state", global_state_of, METH_NOARGS,
     "global_state(): {name: value} of torch's global state as a guard program compares it"},
    {NULL},
};

int
mj_init_global_state(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
