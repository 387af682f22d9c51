/* Calls of fused operators on NVIDIA GPUs: arguments taken, words made or found, results allocated, one
 * launch. */
#include "cuda_calls.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>

#include "cuda_encoder.h"
#include "cuda_gpus.h"
#include "cuda_launch.h"
#include "module.h"
#include "torch_abi.h"

namespace magjit_dvm {

using namespace cuda;

namespace {

PyObject *cuda_fused_type;

/* ---- what takes how long, while somebody asks ---- */

enum Moment : uint8_t { CALLED, TAKEN_ALL, ENCODED_ALL, ALLOCATED, READY, LAUNCHED, N_MOMENTS };
std::array<int64_t, N_MOMENTS> moments; /* of the call that is under way, nanoseconds */
std::vector<std::array<int64_t, N_MOMENTS>> *spans;

void pass(Moment moment)
{
    if (timing) {
        auto now = std::chrono::steady_clock::now().time_since_epoch();
        moments[moment] = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    }
}

/* ---- calls ---- */

PyObject *by_reference(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    if (PyErr_Occurred()) {
        return nullptr;
    }
    PyObject *method = PyObject_GetAttrString(self, "by_reference");
    PyObject *result = method ? PyObject_Vectorcall(method, args, (size_t)n, nullptr) : nullptr;
    Py_XDECREF(method);
    return result;
}

PyObject *by_fallback(CudaFused *self, PyObject *const *args, Py_ssize_t n)
{
    return PyObject_Vectorcall(self->fallback, args, (size_t)n, nullptr);
}

PyObject *refused(CudaFused *self, const char *reason, PyObject *const *args, Py_ssize_t n)
{
    if (self->fallback == Py_None) {
        PyErr_SetString(not_encodable, reason);
        return nullptr;
    }
    return by_fallback(self, args, n);
}

PyObject *as_tuple(const int64_t *numbers, int n)
{
    PyObject *tuple = PyTuple_New(n);
    for (int k = 0; tuple && k < n; k++) {
        PyObject *number = PyLong_FromLongLong(numbers[k]);
        if (!number) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, k, number);
    }
    return tuple;
}

/* Whether `encode` was called, or what it had made was found. */
bool encode_or_find(const CudaFused *self, const Argument *given, const Device &machine,
                    Encoded &encoded)
{
    const Program &program = *self->program;
    MemoKey key;
    if (!read_key(program, given, machine, key)) {
        encode(*self->prepared, given, machine, encoded);
        return true;
    }
    MemoPart numbers{&encoded.each, offsetof(Encoded, patches) - offsetof(Encoded, each)};
    auto arrays = [&] {
        return std::array<MemoPart, 3>{{{encoded.layouts, program.outputs.size() * sizeof(Shape)},
                                        {encoded.patches, encoded.n_patches * sizeof(Patch)},
                                        {encoded.image, (size_t)encoded.n_bytes}}};
    };
    if (self->memo->find(key, numbers, arrays)) {
        encoded.verdict = ENCODED;
        encoded.reason = nullptr;
        return false;
    }
    encode(*self->prepared, given, machine, encoded);
    if (encoded.verdict == ENCODED) {
        self->memo->keep(key, numbers, arrays);
    }
    return true;
}

/* Of an encoding, if it was one, who asks for times is told. */
void pass_encoded(bool made)
{
    pass(ENCODED_ALL);
    if (timing && made) {
        timings->push_back(moments[ENCODED_ALL] - moments[TAKEN_ALL]);
    }
}

} // namespace

PyObject *new_memory(int32_t device_type, int ndim, const Shape &layout, DType dtype, int device,
                     char **data)
{
    PyObject *made = empty_tensor(ndim, layout.sizes, layout.strides, dtype, device_type,
                                  device, data);
    if (made || PyErr_Occurred() || !allocate_hook) {
        if (!made && !PyErr_Occurred()) {
            PyErr_SetString(PyExc_MemoryError, "an output of a fused operator cannot be allocated");
        }
        return made;
    }
    PyObject *sizes = as_tuple(layout.sizes, ndim);
    PyObject *strides = as_tuple(layout.strides, ndim);
    if (sizes && strides) {
        bool cpu = device_type == torch_library.cpu;
        made = PyObject_CallFunction(allocate_hook, "OOii", sizes, strides, (int)dtype,
                                     cpu ? -1 : device);
    }
    Py_XDECREF(sizes);
    Py_XDECREF(strides);
    void *address = nullptr;
    if (made && (!is_plain_tensor(made) || torch_library.get_data(tensor_handle(made), &address))) {
        PyErr_SetString(PyExc_RuntimeError, "a result that is no plain tensor");
        Py_CLEAR(made);
    }
    *data = (char *)address;
    return made;
}

void encode_call(const CudaFused *self, const Argument *given, const Device &machine,
                 Encoded &encoded)
{
    pass(TAKEN_ALL);
    pass_encoded(encode_or_find(self, given, machine, encoded));
}

PyObject *CudaResults::take()
{
    if (count == 1) {
        return Py_NewRef(made[0]);
    }
    PyObject *tuple = PyTuple_New(count); /* of none, if all are parts of an input */
    for (int k = 0; tuple && k < count; k++) {
        PyTuple_SET_ITEM(tuple, k, Py_NewRef(made[k]));
    }
    return tuple;
}

bool allocate_results(const CudaFused *self, const Argument *given, const Encoded &encoded,
                      int device, CudaResults &results)
{
    const Program &program = *self->program;
    int n_inputs = (int)program.inputs.size(), n_outputs = (int)program.outputs.size();
    for (int i = 0; i < n_inputs; i++) {
        bool tensor = program.inputs[i].kind == INPUT_tensor;
        results.addresses[i] = tensor ? given[i].data : 0;
    }
    for (int o = 0; o < n_outputs; o++) {
        if (program.outputs[o].allocated()) {
            char *data = nullptr;
            const Output &out = program.outputs[o];
            PyObject *made = new_memory(self->device_type, out.ndim, encoded.layouts[o],
                                        program.nodes[out.node].dtype, device, &data);
            if (!made) {
                return false;
            }
            results.made[results.count++] = made;
            results.addresses[n_inputs + o] = (uint64_t)data;
        }
    }
    if (encoded.verdict == ENCODED && encoded.n_sums) {
        char *data = nullptr;
        Shape layout{{encoded.n_sums * encoded.parts_rows * encoded.parts_cols}, {1}, 0};
        results.parts = new_memory(self->device_type, 1, layout, DT_f32, device, &data);
        if (!results.parts) {
            return false;
        }
        results.addresses[n_inputs + n_outputs] = (uint64_t)data;
    }
    return true;
}

void write_addresses(Encoded &encoded, const uint64_t *addresses)
{
    for (int k = 0; k < encoded.n_patches; k++) {
        const Patch &patch = encoded.patches[k];
        uint64_t address = addresses[patch.argument] + (uint64_t)patch.offset;
        memcpy(encoded.image + patch.at, &address, sizeof(address));
    }
}

void PartsToAdd::of(const CudaFused *self, const Encoded &encoded, const uint64_t *addresses)
{
    uint64_t parts = addresses[self->program->inputs.size() + self->program->outputs.size()];
    int64_t across = (encoded.parts_cols + SUMS_COLUMNS - 1) / SUMS_COLUMNS;
    for (int k = 0; k < encoded.n_sums; k++) {
        blocks += (uint32_t)across;
        sums[count++] = {parts, addresses[encoded.sums[k].argument], (uint32_t)encoded.parts_rows,
                         (uint32_t)encoded.parts_cols, encoded.sums[k].what, blocks};
        parts += 4 * (uint64_t)(encoded.parts_rows * encoded.parts_cols);
    }
}

int PartsToAdd::launch(int device, void *stream)
{
    if (!count) {
        return 0;
    }
    Launch one{};
    one.function = kernel_of_sums(device);
    one.blocks = blocks;
    one.threads = SUMS_THREADS;
    one.stream = stream;
    one.parameter = (char *)sums;
    one.n_bytes = count * (int)sizeof(Sum);
    return one.function ? magjit_dvm::launch(one) : -1;
}

bool may_launch(const CudaFused *self, const Encoded &encoded, int device)
{
    if (self->fallback == Py_None) {
        return true;
    }
    bool image = kernel_of(device, encoded.each, self->approximate, encoded.form, false) != 0;
    if (PyErr_Occurred()) {
        return false;
    }
    return (!encoded.n_sums || kernel_of_sums(device, false)) && image; /* both are asked for */
}

int launch_image(const CudaFused *self, Encoded &encoded, const uint64_t *addresses, int device)
{
    Launch one{};
    one.function = kernel_of(device, encoded.each, self->approximate, encoded.form);
    if (!one.function || current_stream(self->device_type, device, &one.stream)) {
        return -1;
    }
    write_addresses(encoded, addresses);
    const Gpu &gpu = gpus[device];
    one.blocks = (unsigned)encoded.blocks;
    one.threads = (unsigned)encoded.threads;
    one.shared = (unsigned)encoded.shared_bytes;
    one.parameter = encoded.image;
    one.n_bytes = encoded.n_bytes;
    one.counters = gpu.counters;
    one.n_counters = encoded.draws ? gpu.n_counters : 0;
    pass(READY);
    if (launch(one)) {
        return -1;
    }
    PartsToAdd sums;
    sums.of(self, encoded, addresses);
    int failed = sums.launch(device, one.stream);
    pass(LAUNCHED);
    return failed;
}

namespace {

PyObject *cuda_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *keywords)
{
    CudaFused *self = (CudaFused *)object;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    if (keywords && PyTuple_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "a fused operator takes no keywords");
        return nullptr;
    }
    if (observer && tell_observer(object, args, n)) {
        return nullptr;
    }
    pass(CALLED);
    Argument given[MAX_INPUTS];
    int device;
    const char *reason = nullptr;
    Taken taken = take_arguments(self, args, n, self->device_type, given, device, reason);
    if (taken == TO_PYTHON) {
        return by_reference(object, args, n);
    }
    if (taken == NOT_TAKEN || device < 0) {
        return refused(self, taken == TAKEN ? "no tensor to say which GPU" : reason, args, n);
    }
    if (!is_known(device)) {
        return nullptr;
    }
    Encoded encoded;
    encode_call(self, given, gpus[device].machine, encoded);
    if (encoded.few_rows) {
        bool awaited = false;
        PyObject *found = call_in_steps(self, given, device, awaited);
        if (found || PyErr_Occurred()) {
            return found;
        }
        if (awaited) {
            return by_fallback(self, args, n);
        }
    }
    if (encoded.verdict == REFUSED) {
        return refused(self, encoded.reason, args, n);
    }
    if (encoded.verdict == LEFT) {
        return by_reference(object, args, n);
    }
    if (encoded.verdict == ENCODED && !may_launch(self, encoded, device)) {
        return PyErr_Occurred() ? nullptr : by_fallback(self, args, n);
    }
    CudaResults results;
    if (!allocate_results(self, given, encoded, device, results)) {
        return nullptr;
    }
    pass(ALLOCATED);
    if (encoded.verdict == ENCODED) {
        if (launch_image(self, encoded, results.addresses, device)) {
            return nullptr;
        }
        if (timing) {
            spans->push_back(moments);
        }
    }
    return results.take();
}

/* ---- looking inside ---- */

PyObject *describe(const Program &program, const Encoded &encoded)
{
    PyObject *layouts = PyList_New(0);
    for (size_t o = 0; layouts && o < program.outputs.size(); o++) {
        PyObject *sizes = as_tuple(encoded.layouts[o].sizes, program.outputs[o].ndim);
        PyObject *strides = as_tuple(encoded.layouts[o].strides, program.outputs[o].ndim);
        PyObject *pair = sizes && strides ? PyTuple_Pack(2, sizes, strides) : nullptr;
        Py_XDECREF(sizes);
        Py_XDECREF(strides);
        if (!pair || PyList_Append(layouts, pair)) {
            Py_CLEAR(layouts);
        }
        Py_XDECREF(pair);
    }
    if (!layouts) {
        return nullptr;
    }
    if (encoded.verdict == NOTHING) {
        return Py_BuildValue("(Ny#y#i(LLL)Oi[](LL))", layouts, "", (Py_ssize_t)0, "", (Py_ssize_t)0,
                             32, 0LL, 0LL, 0LL, Py_False, 0, 0LL, 0LL);
    }
    PyObject *sums = PyList_New(encoded.n_sums);
    for (int k = 0; sums && k < encoded.n_sums; k++) {
        PyObject *one = Py_BuildValue("(iI)", encoded.sums[k].argument, encoded.sums[k].what);
        if (!one) {
            Py_CLEAR(sums);
            break;
        }
        PyList_SET_ITEM(sums, k, one);
    }
    if (!sums) {
        Py_DECREF(layouts);
        return nullptr;
    }
    long long rows = encoded.n_sums ? (long long)encoded.parts_rows : 0;
    long long cols = encoded.n_sums ? (long long)encoded.parts_cols : 0;
    return Py_BuildValue(
        "(Ny#y#i(LLL)OiN(LL))", layouts, encoded.image, (Py_ssize_t)encoded.n_bytes,
        (const char *)encoded.patches, (Py_ssize_t)(encoded.n_patches * (int)sizeof(Patch)),
        encoded.each, (long long)encoded.blocks, (long long)encoded.threads,
        (long long)encoded.shared_bytes, encoded.draws ? Py_True : Py_False,
        (int)encoded.form, sums, rows, cols);
}

PyObject *cuda_encode(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    CudaFused *self = (CudaFused *)object;
    Device machine;
    if (n < 1 || read_device(args[0], machine)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "encode(machine, *args)");
        }
        return nullptr;
    }
    Argument given[MAX_INPUTS];
    int device;
    const char *reason = nullptr;
    Taken taken = take_arguments(self, args + 1, n - 1, torch_library.cpu, given, device, reason);
    if (taken == NOT_TAKEN) {
        PyErr_SetString(not_encodable, reason);
        return nullptr;
    }
    if (PyErr_Occurred() || taken == TO_PYTHON) {
        return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
    }
    Encoded encoded;
    pass(TAKEN_ALL);
    encode(*self->prepared, given, machine, encoded);
    pass_encoded(true);
    if (encoded.verdict == REFUSED) {
        PyErr_SetString(not_encodable, encoded.reason);
        return nullptr;
    }
    return encoded.verdict == LEFT ? Py_NewRef(Py_None) : describe(*self->program, encoded);
}

PyObject *cuda_kept(PyObject *object, PyObject *)
{
    const Memo *memo = ((CudaFused *)object)->memo;
    return PyLong_FromLong(memo ? memo->count() : 0);
}

/* ---- making one ---- */

int read_lists(CudaFused *self, PyObject *lists)
{
    int rank;
    PyObject *inputs, *nodes, *outputs;
    const char *floats;
    Py_ssize_t n;
    if (!PyArg_ParseTuple(lists, "iO!O!O!y#:program", &rank, &PyList_Type, &inputs, &PyList_Type,
                          &nodes, &PyList_Type, &outputs, &floats, &n)) {
        return -1;
    }
    auto program = std::make_unique<Program>();
    program->rank = rank;
    if (rank < 0 || rank > MAX_DIMS || n != PyList_GET_SIZE(nodes) || !words.ready) {
        PyErr_SetString(PyExc_ValueError, "at most 8 dimensions, and a flag for each node");
        return -1;
    }
    if (read_program(*program, inputs, nodes, outputs)) {
        return -1;
    }
    for (const Output &out : program->outputs) {
        if (out.whole >= 0 && program->inputs[out.whole].ndim != out.ndim) {
            PyErr_SetString(PyExc_ValueError, "a whole of another rank");
            return -1;
        }
    }
    self->program = program.release();
    self->prepared = new Prepared(prepare(*self->program, floats));
    self->memo = new Memo;
    return 0;
}

PyObject *cuda_fused_new(PyTypeObject *type, PyObject *args, PyObject *)
{
    PyObject *lists, *fallback = Py_None;
    int approximate = 0, home = -1, device_type = torch_library.cuda;
    if (!PyArg_ParseTuple(args, "O|Opii:CudaFused", &lists, &fallback, &approximate, &home,
                          &device_type)) {
        return nullptr;
    }
    CudaFused *self = (CudaFused *)type->tp_alloc(type, 0);
    if (!self) {
        return nullptr;
    }
    self->call = cuda_call;
    self->fallback = Py_NewRef(fallback);
    self->device_type = device_type;
    self->home = home;
    self->approximate = approximate != 0;
    if (lists != Py_None && read_lists(self, lists)) {
        Py_DECREF(self);
        return nullptr;
    }
    return (PyObject *)self;
}

int cuda_fused_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((CudaFused *)object)->fallback);
    Py_VISIT(Py_TYPE(object));
    return visit_steps((CudaFused *)object, visit, arg);
}

int cuda_fused_clear(PyObject *object)
{
    Py_CLEAR(((CudaFused *)object)->fallback);
    clear_steps((CudaFused *)object);
    return 0;
}

void cuda_fused_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    cuda_fused_clear(object);
    delete ((CudaFused *)object)->memo;
    delete ((CudaFused *)object)->prepared;
    delete ((CudaFused *)object)->program;
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyMethodDef cuda_fused_methods[] = {
    {"encode", (PyCFunction)(void (*)(void))cuda_encode, METH_FASTCALL,
     "encode(machine, *args): (layouts, image, patches, R, (blocks, threads, shared bytes), whether "
     "tiles are drawn, sums across rows, (rows, columns) of their parts) for tensors on the CPU that "
     "stand for a GPU's; None where it is left to Python."},
    {"kept", cuda_kept, METH_NOARGS, "kept(): of how many kinds of arguments images are kept."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef cuda_fused_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CudaFused, call), READONLY, nullptr},
    {"fallback", T_OBJECT, offsetof(CudaFused, fallback), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot cuda_fused_slots[] = {{Py_tp_new, (void *)cuda_fused_new},
                                  {Py_tp_dealloc, (void *)cuda_fused_dealloc},
                                  {Py_tp_traverse, (void *)cuda_fused_traverse},
                                  {Py_tp_clear, (void *)cuda_fused_clear},
                                  {Py_tp_call, (void *)PyVectorcall_Call},
                                  {Py_tp_methods, cuda_fused_methods},
                                  {Py_tp_members, cuda_fused_members},
                                  {0, nullptr}};

PyType_Spec cuda_fused_spec = {"magjit_dvm._vm.CudaFused", sizeof(CudaFused), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE |
                                   Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC,
                               cuda_fused_slots};

} // namespace

bool is_cuda_fused(PyObject *object)
{
    return PyObject_TypeCheck(object, (PyTypeObject *)cuda_fused_type);
}

PyObject *py_cuda_spans(PyObject *, PyObject *)
{
    PyObject *list = PyList_New(0);
    for (const auto &one : *spans) {
        int64_t lengths[N_MOMENTS - 1];
        for (int k = 0; k + 1 < N_MOMENTS; k++) {
            lengths[k] = one[k + 1] - one[k];
        }
        PyObject *tuple = list ? as_tuple(lengths, N_MOMENTS - 1) : nullptr;
        if (!tuple || PyList_Append(list, tuple)) {
            Py_CLEAR(list);
        }
        Py_XDECREF(tuple);
    }
    spans->clear();
    return list;
}

int add_cuda_fused(PyObject *module)
{
    spans = new std::vector<std::array<int64_t, N_MOMENTS>>;
    cuda_fused_type = PyType_FromModuleAndSpec(module, &cuda_fused_spec, nullptr);
    return cuda_fused_type ? PyModule_AddObjectRef(module, "CudaFused", cuda_fused_type) : -1;
}

} // namespace magjit_dvm
