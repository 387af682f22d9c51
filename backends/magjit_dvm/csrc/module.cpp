/* The Python module: fused operators as callables, and what shows what they do. */
#include "torch_abi.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>

#include "program.h"

namespace magjit_dvm {

namespace {

Machine machine = {1, 1 << 20, 28 << 10, 32768};
PyObject *not_encodable;

/* Nanoseconds that instances took to encode, while somebody wants to know. */
bool timing = false;
std::vector<int64_t> *timings;

struct Fused {
    PyObject_HEAD
    vectorcallfunc call;
    Program *program;
    PyObject *fallback; /* called with the same arguments where a program cannot be encoded */
    PyObject *source;   /* the program as Python has it, for people */
};

/* A list that gets (fused operator, arguments) of each call, while somebody wants to know. */
PyObject *observer;

/* ---- the arguments of a call ---- */

/* What an argument is; a message where it is not what the program was made for. */
const char *take(const Input &in, PyObject *object, Given &given)
{
    if (in.kind == INPUT_tensor) {
        if (!is_plain_tensor(object)) {
            return "not a plain tensor";
        }
        const TorchLibrary &lib = torch_library;
        void *handle = tensor_handle(object);
        int32_t dtype, device;
        int64_t ndim;
        void *data;
        if (lib.get_dtype(handle, &dtype) || lib.get_device_type(handle, &device) ||
            lib.get_dim(handle, &ndim)) {
            return "a tensor without metadata";
        }
        if (dtype != lib.dtypes[in.dtype] || device != lib.cpu || ndim != in.ndim) {
            return "a tensor of another dtype, device or rank";
        }
        if (lib.get_sizes(handle, (int64_t **)&given.sizes) ||
            lib.get_strides(handle, (int64_t **)&given.strides) || lib.get_data(handle, &data)) {
            return "a tensor without storage";
        }
        given.data = (char *)data;
        return nullptr;
    }
    given.data = nullptr;
    if (PyLong_Check(object)) {
        int overflow;
        given.integer = PyLong_AsLongLongAndOverflow(object, &overflow);
        given.number = PyLong_AsDouble(object);
        if (overflow || PyErr_Occurred()) {
            PyErr_Clear();
            return "an int of more than 64 bits";
        }
        return nullptr;
    }
    if (PyFloat_Check(object) && in.kind == INPUT_float) {
        given.number = PyFloat_AS_DOUBLE(object);
        return nullptr;
    }
    return "not a number";
}

/* The thread's memory for a program of bytecode, for as long as one call needs it. A call within the
 * call (allocating an object may collect garbage, whose finalizers may call anything) has its own. */
class CodeClaim {
public:
    CodeClaim()
        : nested(claimed),
          code(nested ? new (std::nothrow) Code : (Code *)thread_memory(FOR_code, sizeof(Code)))
    {
        claimed = true;
    }
    ~CodeClaim()
    {
        claimed = nested;
        if (nested) {
            delete code;
        }
    }
    CodeClaim(const CodeClaim &) = delete;
    Code *get() const { return code; } /* NULL: no memory */

private:
    static thread_local bool claimed;
    bool nested;
    Code *code;
};
thread_local bool CodeClaim::claimed = false;

/* Between two operators their tensors have driven everything else out of the caches: fetch what
 * encoding will touch all at once, not miss by miss. */
void fetch(const Program &program, const Code &code)
{
    auto lines = [](const void *first, size_t bytes) {
        for (size_t at = 0; at < bytes; at += 64) {
            __builtin_prefetch((const char *)first + at);
        }
    };
    fetch_encoder();
    size_t n = program.nodes.size();
    lines(program.nodes.data(), n * sizeof(Node));
    lines(program.inputs.data(), program.inputs.size() * sizeof(Input));
    lines(program.outputs.data(), program.outputs.size() * sizeof(Output));
    lines(&code.header, sizeof(Header));
    lines(code.slots, 2 * n * sizeof(Slot));
    lines(code.words, 2 * n * sizeof(Insn));
    lines(code.constants, 64);
    lines(code.outputs, sizeof(Shape) * program.outputs.size());
}

int threads_now()
{
    return torch_library.num_threads ? torch_library.num_threads() : 1;
}

int64_t nanoseconds()
{
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

const char *prepare(Fused *self, PyObject *const *args, Py_ssize_t n, Given *given, Code &code)
{
    const Program &program = *self->program;
    int64_t begin = timing ? nanoseconds() : 0;
    fetch(program, code);
    int64_t spent = timing ? nanoseconds() - begin : 0;
    if (n != (Py_ssize_t)program.inputs.size()) {
        return "another number of arguments";
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (const char *error = take(program.inputs[i], args[i], given[i])) {
            return error;
        }
    }
    Machine now = machine;
    now.threads = std::max(1, threads_now());
    begin = timing ? nanoseconds() : 0;
    const char *error = encode(program, given, now, code);
    if (timing) {
        timings->push_back(spent + nanoseconds() - begin);
    }
    return error;
}

PyObject *otherwise(Fused *self, const char *error, PyObject *const *args, Py_ssize_t n)
{
    if (PyErr_Occurred()) {
        return nullptr;
    }
    if (self->fallback == Py_None) {
        PyErr_SetString(not_encodable, error);
        return nullptr;
    }
    return PyObject_Vectorcall(self->fallback, args, n, nullptr);
}

PyObject *fused_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *keywords)
{
    Fused *self = (Fused *)object;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    if (keywords && PyTuple_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "a fused operator takes no keywords");
        return nullptr;
    }
    if (observer) {
        PyObject *seen = PyTuple_New(n + 1);
        if (!seen) {
            return nullptr;
        }
        PyTuple_SET_ITEM(seen, 0, Py_NewRef(object));
        for (Py_ssize_t i = 0; i < n; i++) {
            PyTuple_SET_ITEM(seen, i + 1, Py_NewRef(args[i]));
        }
        int failed = PyList_Append(observer, seen);
        Py_DECREF(seen);
        if (failed) {
            return nullptr;
        }
    }
    Given given[MAX_INPUTS];
    CodeClaim claim;
    if (!claim.get()) {
        return PyErr_NoMemory();
    }
    Code &code = *claim.get();
    if (const char *error = prepare(self, args, n, given, code)) {
        return otherwise(self, error, args, n);
    }
    const Program &program = *self->program;
    size_t n_outputs = program.outputs.size();
    char *arguments[MAX_INPUTS + MAX_OUTPUTS];
    for (Py_ssize_t i = 0; i < n; i++) {
        arguments[i] = given[i].data;
    }
    PyObject *made[MAX_OUTPUTS];
    for (size_t o = 0; o < n_outputs; o++) {
        const Output &out = program.outputs[o];
        made[o] = new_tensor(out.ndim, code.outputs[o].sizes, code.outputs[o].strides,
                             program.nodes[out.node].dtype, &arguments[n + o]);
        if (!made[o]) {
            for (size_t k = 0; k < o; k++) {
                Py_DECREF(made[k]);
            }
            return nullptr;
        }
    }
    int status = 0;
    if (!code.empty) {
        PyThreadState *state = code.header.elements > 16384 ? PyEval_SaveThread() : nullptr;
        status = execute(code, arguments);
        if (state) {
            PyEval_RestoreThread(state);
        }
    }
    if (status) {
        for (size_t o = 0; o < n_outputs; o++) {
            Py_DECREF(made[o]);
        }
        if (status & NO_MEMORY) {
            return PyErr_NoMemory();
        }
        if (self->fallback != Py_None) {
            return otherwise(self, nullptr, args, n); /* raises what torch raises, as torch says it */
        }
        if (status & OUT_OF_BOUNDS) {
            PyErr_SetString(PyExc_IndexError, "index out of range in self");
        } else {
            PyErr_SetString(PyExc_RuntimeError, "ZeroDivisionError");
        }
        return nullptr;
    }
    if (n_outputs == 1) {
        return made[0];
    }
    PyObject *result = PyTuple_New((Py_ssize_t)n_outputs);
    for (size_t o = 0; o < n_outputs; o++) {
        if (result) {
            PyTuple_SET_ITEM(result, (Py_ssize_t)o, made[o]);
        } else {
            Py_DECREF(made[o]);
        }
    }
    return result;
}

/* ---- making one ---- */

bool read_dims(PyObject *tuple, int8_t *dims, int8_t *ndim, int lowest, int rank)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) > MAX_DIMS) {
        PyErr_SetString(PyExc_ValueError, "dimensions are a tuple of at most 8 ints");
        return false;
    }
    *ndim = (int8_t)PyTuple_GET_SIZE(tuple);
    for (int k = 0; k < *ndim; k++) {
        long d = PyLong_AsLong(PyTuple_GET_ITEM(tuple, k));
        if (PyErr_Occurred()) {
            return false;
        }
        if (d < lowest || d >= rank) {
            PyErr_Format(PyExc_ValueError, "dimension %ld is out of range", d);
            return false;
        }
        dims[k] = (int8_t)d;
    }
    return true;
}

int fill_program(Program &program, PyObject *inputs, PyObject *nodes, PyObject *outputs)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); i++) {
        Input in{};
        int kind, dtype;
        PyObject *dims;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(inputs, i), "iiO:input", &kind, &dtype, &dims) ||
            !read_dims(dims, in.dims, &in.ndim, DIM_indexed, program.rank)) {
            return -1;
        }
        if (kind < 0 || kind > INPUT_float || dtype < 0 || dtype >= N_DTYPES) {
            PyErr_SetString(PyExc_ValueError, "an input of an unknown kind or dtype");
            return -1;
        }
        in.kind = (InputKind)kind;
        in.dtype = (DType)dtype;
        program.inputs.push_back(in);
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); i++) {
        Node node{};
        int kind, dtype, op, a, b, c, aux, mask;
        long long integer;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(nodes, i), "iiiiiiiidL:node", &kind, &dtype, &op, &a,
                              &b, &c, &aux, &mask, &node.number, &integer)) {
            return -1;
        }
        if (kind < 0 || kind >= N_NODE_KINDS || dtype < 0 || dtype >= N_DTYPES || op < 0 ||
            op >= N_OPS || aux < -1 || aux > 1 << 14 || std::max({a, b, c}) >= MAX_NODES ||
            std::min({a, b, c}) < -1) {
            PyErr_SetString(PyExc_ValueError,
                            "a node of an unknown kind, dtype, instruction or operand");
            return -1;
        }
        node.kind = (NodeKind)kind;
        node.dtype = (DType)dtype;
        node.op = (uint16_t)op;
        node.args[0] = (int16_t)a;
        node.args[1] = (int16_t)b;
        node.args[2] = (int16_t)c;
        node.aux = (int16_t)aux;
        node.mask = (uint32_t)mask;
        node.integer = integer;
        program.nodes.push_back(node);
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs); i++) {
        Output out{};
        int node;
        int8_t n_order;
        PyObject *dims, *order;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(outputs, i), "iOO:output", &node, &dims, &order)) {
            return -1;
        }
        if (node < 0 || node >= MAX_NODES) {
            PyErr_SetString(PyExc_ValueError, "an output of a node that is not there");
            return -1;
        }
        if (!read_dims(dims, out.dims, &out.ndim, DIM_one, program.rank) ||
            !read_dims(order, out.order, &n_order, 0, out.ndim)) {
            return -1;
        }
        if (n_order != out.ndim) {
            PyErr_SetString(PyExc_ValueError, "the order of an output names each dimension once");
            return -1;
        }
        out.node = (int16_t)node;
        program.outputs.push_back(out);
    }
    std::string error = program.verify();
    if (!error.empty()) {
        PyErr_SetString(PyExc_ValueError, error.c_str());
        return -1;
    }
    return 0;
}

PyObject *fused_new(PyTypeObject *type, PyObject *args, PyObject *)
{
    int rank;
    PyObject *inputs, *nodes, *outputs, *fallback = Py_None, *source = Py_None;
    if (!PyArg_ParseTuple(args, "iO!O!O!|OO:Fused", &rank, &PyList_Type, &inputs, &PyList_Type,
                          &nodes, &PyList_Type, &outputs, &fallback, &source)) {
        return nullptr;
    }
    if (rank < 0 || rank > MAX_DIMS) {
        PyErr_SetString(PyExc_ValueError, "at most 8 dimensions");
        return nullptr;
    }
    auto program = std::make_unique<Program>();
    program->rank = rank;
    if (fill_program(*program, inputs, nodes, outputs)) {
        return nullptr;
    }
    Fused *self = (Fused *)type->tp_alloc(type, 0);
    if (self) {
        self->call = fused_call;
        self->program = program.release();
        self->fallback = Py_NewRef(fallback);
        self->source = Py_NewRef(source);
    }
    return (PyObject *)self;
}

int fused_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((Fused *)object)->fallback);
    Py_VISIT(((Fused *)object)->source);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

int fused_clear(PyObject *object)
{
    Py_CLEAR(((Fused *)object)->fallback);
    Py_CLEAR(((Fused *)object)->source);
    return 0;
}

void fused_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    fused_clear(object);
    delete ((Fused *)object)->program;
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

/* ---- looking inside ---- */

PyObject *describe_slot(const Code &code, int s)
{
    const Slot &slot = code.slots[s];
    const Header &h = code.header;
    PyObject *outer = PyTuple_New(h.n_outer + h.n_inner);
    for (int i = 0; outer && i < h.n_outer + h.n_inner; i++) {
        PyTuple_SET_ITEM(outer, i, PyLong_FromLongLong(code.outer[s][i]));
    }
    return Py_BuildValue("(iiiiiLLN)", slot.kind, slot.dtype, slot.shape, slot.argument,
                         (int)slot.local, (long long)slot.row, (long long)slot.col, outer);
}

/* encode(args) -> dict: the program of bytecode for these arguments, for people and tests. */
PyObject *fused_encode(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    Fused *self = (Fused *)object;
    Given given[MAX_INPUTS];
    CodeClaim claim;
    if (!claim.get()) {
        return PyErr_NoMemory();
    }
    Code &code = *claim.get();
    if (const char *error = prepare(self, args, n, given, code)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(not_encodable, error);
        }
        return nullptr;
    }
    const Header &h = code.header;
    if (code.empty) {
        return Py_BuildValue("{s:O}", "empty", Py_True);
    }
    PyObject *outer = PyList_New(0), *slots = PyList_New(0), *phases = PyList_New(0);
    PyObject *constants = PyList_New(0), *insns = PyList_New(0);
    auto add = [](PyObject *list, PyObject *item) {
        if (item) {
            PyList_Append(list, item);
            Py_DECREF(item);
        }
    };
    for (int i = 0; i < h.n_outer + h.n_inner; i++) {
        add(outer, PyLong_FromLongLong(h.outer[i]));
    }
    for (int s = 0; s < h.n_slots; s++) {
        add(slots, describe_slot(code, s));
    }
    for (int p = 0; p < h.n_phases; p++) {
        const Phase &phase = h.phases[p];
        add(phases, Py_BuildValue("(IIILL)", phase.prologue, phase.step, phase.end,
                                  (long long)phase.step_rows, (long long)phase.step_cols));
    }
    for (int c = 0; c < h.n_constants; c++) {
        add(constants, PyLong_FromUnsignedLongLong(code.constants[c]));
    }
    for (uint32_t at = 0; at < h.code_words;) {
        Insn insn;
        memcpy(&insn, &code.words[at], sizeof(insn));
        add(insns, Py_BuildValue("(IHBBBBHHHH)", at, insn.op, insn.dtype, insn.length, insn.shape,
                                 insn.aux, insn.dst, insn.a, insn.b, insn.c));
        at += insn.length;
    }
    size_t n_bytes = offsetof(Code, outputs);
    return Py_BuildValue(
        "{s:i,s:i,s:i,s:i,s:N,s:L,s:L,s:L,s:L,s:L,s:L,s:i,s:i,s:N,s:N,s:N,s:N,s:y#}",
        "reduces", h.reduces, "flat", h.flat, "n_outer", h.n_outer, "n_inner", h.n_inner, "outer",
        outer, "rows", (long long)h.rows, "cols", (long long)h.cols, "tile_rows",
        (long long)h.tile_rows, "tile_cols", (long long)h.tile_cols, "tiles", (long long)h.tiles,
        "elements", (long long)h.elements, "local_bytes", (int)h.local_bytes, "code_words",
        (int)h.code_words, "slots", slots, "phases", phases, "constants", constants, "insns", insns,
        "image", (const char *)&code, (Py_ssize_t)n_bytes);
}

PyMethodDef fused_methods[] = {
    {"encode", (PyCFunction)(void (*)(void))fused_encode, METH_FASTCALL,
     "encode(*args): the bytecode for these arguments, as a dict."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef fused_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Fused, call), READONLY, nullptr},
    {"fallback", T_OBJECT, offsetof(Fused, fallback), READONLY, nullptr},
    {"source", T_OBJECT, offsetof(Fused, source), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot fused_slots[] = {{Py_tp_new, (void *)fused_new},
                             {Py_tp_dealloc, (void *)fused_dealloc},
                             {Py_tp_traverse, (void *)fused_traverse},
                             {Py_tp_clear, (void *)fused_clear},
                             {Py_tp_call, (void *)PyVectorcall_Call},
                             {Py_tp_methods, fused_methods},
                             {Py_tp_members, fused_members},
                             {0, nullptr}};

PyType_Spec fused_spec = {"magjit_dvm._vm.Fused", sizeof(Fused), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC,
                          fused_slots};

/* ---- functions ---- */

PyObject *py_bind(PyObject *, PyObject *args)
{
    PyObject *example, *tensor, *parameter, *steal;
    unsigned long long impl;
    if (!PyArg_ParseTuple(args, "OKOOO:bind", &example, &impl, &tensor, &parameter, &steal) ||
        bind_torch(example, impl, tensor, parameter, steal)) {
        return nullptr;
    }
    find_runtime();
    Py_RETURN_NONE;
}

PyObject *py_timing(PyObject *, PyObject *on)
{
    int wanted = PyObject_IsTrue(on);
    if (wanted < 0) {
        return nullptr;
    }
    PyObject *list = PyList_New(0);
    for (int64_t one : *timings) {
        PyObject *number = PyLong_FromLongLong(one);
        if (!list || !number || PyList_Append(list, number)) {
            Py_XDECREF(number);
            Py_XDECREF(list);
            return nullptr;
        }
        Py_DECREF(number);
    }
    timings->clear();
    timing = wanted;
    return list;
}

PyObject *py_verify(PyObject *, PyObject *args)
{
    const char *image;
    Py_ssize_t n;
    PyObject *extents;
    if (!PyArg_ParseTuple(args, "y#O!:verify", &image, &n, &PyList_Type, &extents)) {
        return nullptr;
    }
    if (n != (Py_ssize_t)offsetof(Code, outputs)) {
        return PyUnicode_FromString("a program of another length");
    }
    Extent given[MAX_ARGS];
    Py_ssize_t count = std::min<Py_ssize_t>(PyList_GET_SIZE(extents), MAX_ARGS);
    for (Py_ssize_t i = 0; i < count; i++) {
        long long low, high;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(extents, i), "LL:extent", &low, &high)) {
            return nullptr;
        }
        given[i] = {low, high};
    }
    auto code = std::make_unique<Code>();
    memcpy((void *)code.get(), image, (size_t)n);
    const char *error = verify(*code, given, (int)count);
    if (!error) {
        Py_RETURN_NONE;
    }
    return PyUnicode_FromString(error);
}

PyObject *py_machine(PyObject *, PyObject *args)
{
    long long local = machine.local_bytes, step = machine.step_bytes, grain = machine.grain;
    if (!PyArg_ParseTuple(args, "|LLL:machine", &local, &step, &grain)) {
        return nullptr;
    }
    if (local < 4096 || step < 4096 || grain < 1 || local > (1LL << 28)) {
        PyErr_SetString(PyExc_ValueError, "local memory and steps have 4 KiB at least");
        return nullptr;
    }
    PyObject *before = Py_BuildValue("(LLL)", (long long)machine.local_bytes,
                                     (long long)machine.step_bytes, (long long)machine.grain);
    machine.local_bytes = local;
    machine.step_bytes = step;
    machine.grain = grain;
    return before;
}

PyObject *py_observe(PyObject *, PyObject *list)
{
    if (list != Py_None && !PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "observe takes a list or None");
        return nullptr;
    }
    Py_XSETREF(observer, list == Py_None ? nullptr : Py_NewRef(list));
    Py_RETURN_NONE;
}

PyObject *py_level(PyObject *, PyObject *) { return PyUnicode_FromString(kernels().level); }

PyMethodDef functions[] = {
    {"bind", py_bind, METH_VARARGS, "bind(example, impl, Tensor, Parameter, steal)"},
    {"timing", py_timing, METH_O,
     "timing(on): nanoseconds of each encoding since the last call; goes on if `on`."},
    {"verify", py_verify, METH_VARARGS, "verify(image, extents): what is wrong, or None."},
    {"machine", py_machine, METH_VARARGS,
     "machine([local bytes, step bytes, grain]): the settings before."},
    {"observe", py_observe, METH_O,
     "observe(list): each call of a fused operator appends (operator, *arguments); None ends it."},
    {"level", py_level, METH_NOARGS, "level(): of x86-64, whose kernels run."},
    {nullptr, nullptr, 0, nullptr}};

int fill_module(PyObject *module)
{
    timings = new std::vector<int64_t>;
    long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE), l1 = sysconf(_SC_LEVEL1_DCACHE_SIZE);
    if (l2 > 0) {
        machine.local_bytes = std::clamp<int64_t>(l2 / 2, 128 << 10, 1 << 20);
    }
    if (l1 > 0) {
        machine.step_bytes = std::clamp<int64_t>(l1 * 9 / 8, 24 << 10, 96 << 10);
    }
    PyObject *type = PyType_FromModuleAndSpec(module, &fused_spec, nullptr);
    not_encodable = PyErr_NewExceptionWithDoc("magjit_dvm._vm.NotEncodable",
                                              "These arguments have no bytecode; it says why.",
                                              PyExc_ValueError, nullptr);
    if (!type || !not_encodable || PyModule_AddObjectRef(module, "Fused", type) ||
        PyModule_AddObjectRef(module, "NotEncodable", not_encodable)) {
        return -1;
    }
    Py_DECREF(type);
    return 0;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)fill_module}, {0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_vm", "The virtual machine.", 0, functions,
                          module_slots, nullptr, nullptr, nullptr};

} // namespace

} // namespace magjit_dvm

PyMODINIT_FUNC PyInit__vm(void) { return PyModuleDef_Init(&magjit_dvm::definition); }
