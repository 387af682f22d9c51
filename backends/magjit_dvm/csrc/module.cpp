/* The Python module: fused operators as callables, and what shows what they do. */
#include "cuda_calls.h"
#include "cuda_gpus.h"
#include "cuda_encoder.h"
#include "cuda_launch.h"
#include "module.h"
#include "torch_abi.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>

namespace magjit_dvm {

namespace {

/* ---- making one ---- */

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
    if (read_program(*program, inputs, nodes, outputs)) {
        return nullptr;
    }
    Fused *self = (Fused *)type->tp_alloc(type, 0);
    if (self) {
        self->call = fused_call;
        self->program = program.release();
        self->memo = new Memo;
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
    delete ((Fused *)object)->memo;
    delete ((Fused *)object)->program;
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

/* ---- looking inside ---- */

PyObject *fused_kept(PyObject *object, PyObject *)
{
    return PyLong_FromLong(((Fused *)object)->memo->count());
}

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
    if (const char *error = prepare_anew(self, args, n, given, code)) {
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
        "{s:i,s:i,s:i,s:i,s:N,s:L,s:L,s:L,s:L,s:L,s:O,s:O,s:L,s:i,s:i,s:N,s:N,s:N,s:N,s:y#}",
        "reduces", h.reduces, "flat", h.flat, "n_outer", h.n_outer, "n_inner", h.n_inner, "outer",
        outer, "rows", (long long)h.rows, "cols", (long long)h.cols, "tile_rows",
        (long long)h.tile_rows, "tile_cols", (long long)h.tile_cols, "tiles", (long long)h.tiles,
        "ahead", code.ahead ? Py_True : Py_False, "streams", code.streams ? Py_True : Py_False,
        "elements", (long long)h.elements,
        "local_bytes", (int)h.local_bytes, "code_words", (int)h.code_words, "slots", slots, "phases", phases, "constants", constants, "insns", insns,
        "image", (const char *)&code, (Py_ssize_t)n_bytes);
}

PyMethodDef fused_methods[] = {
    {"encode", (PyCFunction)(void (*)(void))fused_encode, METH_FASTCALL,
     "encode(*args): the bytecode for these arguments, as a dict."},
    {"kept", fused_kept, METH_NOARGS, "kept(): of how many kinds of arguments bytecode is kept."},
    {"panel", (PyCFunction)(void (*)(void))fused_panel, METH_FASTCALL,
     "panel(window, number, results, *args): the part of a call within ((loop, first, count, total), "
     "...), argument `number` being that part already; the results, made if there are none."},
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
    long long cached = machine.cached_bytes;
    if (!PyArg_ParseTuple(args, "|LLLL:machine", &local, &step, &grain, &cached)) {
        return nullptr;
    }
    if (local < 4096 || step < 4096 || grain < 1 || local > (1LL << 28)) {
        PyErr_SetString(PyExc_ValueError, "local memory and steps have 4 KiB at least");
        return nullptr;
    }
    if (cached < 1 || cached > (1LL << 40)) {
        PyErr_SetString(PyExc_ValueError, "caches have a byte at least, and at most a tebibyte");
        return nullptr;
    }
    PyObject *before = Py_BuildValue("(LLLL)", (long long)machine.local_bytes,
                                     (long long)machine.step_bytes, (long long)machine.grain,
                                     (long long)machine.cached_bytes);
    machine.local_bytes = local;
    machine.step_bytes = step;
    machine.grain = grain;
    machine.cached_bytes = cached;
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
     "machine([local bytes, step bytes, grain, cached bytes]): the settings before."},
    {"stacked", (PyCFunction)(void (*)(void))stacked_call, METH_FASTCALL,
     "stacked(operators, *args): results of up to 8 fused operators, one after another; args are those "
     "of all of them. They do not depend on one another, but on a GPU, where a whole number in a "
     "tensor's place is that of a result of the operators before, counted from 0."},
    {"convolution", (PyCFunction)(void (*)(void))convolution_call, METH_FASTCALL,
     "convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups): as "
     "torch has it; of small images by kernels of the machine."},
    {"convolution_by", py_convolution_by, METH_O,
     "convolution_by(function): what computes any other convolution."},
    {"linear", (PyCFunction)(void (*)(void))linear_call, METH_FASTCALL,
     "linear(x, weight[, bias]): as torch has it; of few rows by kernels of the machine."},
    {"linear_by", py_linear_by, METH_O, "linear_by(function): what computes any other linear."},
    {"observe", py_observe, METH_O,
     "observe(list): each call of a fused operator appends (operator, *arguments); None ends it."},
    {"cuda_load", py_cuda_load, METH_VARARGS,
     "cuda_load(device, cubin, name, shared bytes, overlaps): a kernel's handle in the device's "
     "context; whether it may begin before what came before it has ended."},
    {"cuda_launch", py_cuda_launch, METH_VARARGS,
     "cuda_launch(function, blocks, threads, shared bytes, stream, image, patches, addresses, counters, "
     "n_counters): run an image on a stream."},
    {"cuda_pair", (PyCFunction)(void (*)(void))cuda_pair, METH_FASTCALL,
     "cuda_pair(plan, given, ending, numbers, shapes): two launches, the second of what the first leaves "
     "in memory of both; the tensors that are made, or None where one is not plain."},
    {"cuda_words", cuda::py_cuda_words, METH_VARARGS,
     "cuda_words(numbers, rows, limits): operators by name, and those of each instruction."},
    {"cuda_hooks", py_cuda_hooks, METH_VARARGS,
     "cuda_hooks(kernel, allocate): functions that are asked for kernels and for memory."},
    {"cuda_gpu", py_cuda_gpu, METH_VARARGS,
     "cuda_gpu(device, machine, counters, n_counters): tells of a GPU."},
    {"cuda_spans", py_cuda_spans, METH_NOARGS,
     "cuda_spans(): of each launch while `timing` was on, nanoseconds of arguments, encoding, "
     "results, addresses, and the driver."},
    {"level", py_level, METH_NOARGS, "level(): of x86-64, whose kernels run."},
    {nullptr, nullptr, 0, nullptr}};

/* Of the third-level cache that a core reaches: where a processor has several, the C library may
 * give their sum. */
long third_level_bytes()
{
    long kilobytes = 0;
    if (FILE *file = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
        if (fscanf(file, "%ldK", &kilobytes) != 1) {
            kilobytes = 0;
        }
        fclose(file);
    }
    return kilobytes > 0 ? kilobytes << 10 : sysconf(_SC_LEVEL3_CACHE_SIZE);
}

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
    long l3 = third_level_bytes();
    if (l3 > 0) {
        machine.cached_bytes = std::clamp<int64_t>(l3 / 2, 4 << 20, 64 << 20);
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
    return add_cuda(module) || add_cuda_fused(module) || add_views(module) ? -1 : 0;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)fill_module}, {0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_vm", "The virtual machine.", 0, functions,
                          module_slots, nullptr, nullptr, nullptr};

} // namespace

} // namespace magjit_dvm

PyMODINIT_FUNC PyInit__vm(void) { return PyModuleDef_Init(&magjit_dvm::definition); }
