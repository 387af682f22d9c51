/* Calls of fused operators: arguments taken, bytecode made, results allocated, the machine run. */
#include <algorithm>
#include <array>
#include <chrono>
#include <new>

#include "module.h"
#include "torch_abi.h"

namespace magjit_dvm {

Machine machine = {1, 1 << 20, 28 << 10, 32768, 8 << 20};
PyObject *not_encodable;
bool timing = false;
std::vector<int64_t> *timings;
PyObject *observer;

thread_local bool CodeClaim::claimed = false;

int threads_now()
{
    const TorchLibrary &lib = torch_library;
    /* torch's own function also tells its OpenMP runtime of a new thread's number, but once. The
     * runtime says the same, and takes fewer cache misses to do so. */
    thread_local bool told = false;
    if (told && lib.max_threads) {
        return std::max(1, lib.max_threads());
    }
    told = true;
    return lib.num_threads ? std::max(1, lib.num_threads()) : 1;
}

namespace {

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

/* Between two operators their tensors have driven everything else out of the caches: fetch what
 * encoding will touch all at once, not miss by miss. */
void fetch(const Program &program, const Code &code)
{
    size_t n = program.nodes.size();
    fetch_lines(program.nodes.data(), n * sizeof(Node));
    fetch_lines(program.inputs.data(), program.inputs.size() * sizeof(Input));
    fetch_lines(program.outputs.data(), program.outputs.size() * sizeof(Output));
    fetch_lines(&code.header, sizeof(Header));
    fetch_lines(code.slots, 2 * n * sizeof(Slot));
    fetch_lines(code.words, 2 * n * sizeof(Insn));
    fetch_lines(code.constants, 64);
    fetch_lines(code.outputs, sizeof(Shape) * program.outputs.size());
    fetch_encoder(program);
}

int64_t nanoseconds()
{
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

const char *take_all(const Program &program, PyObject *const *args, Py_ssize_t n, Given *given)
{
    if (n != (Py_ssize_t)program.inputs.size()) {
        return "another number of arguments";
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (const char *error = take(program.inputs[i], args[i], given[i])) {
            return error;
        }
    }
    return nullptr;
}

Machine machine_now()
{
    Machine now = machine;
    now.threads = threads_now();
    return now;
}

MemoKey key_of(const Program &program, const Given *given, const Machine &now)
{
    MemoKey key;
    key.add((int64_t)now.threads);
    key.add(now.local_bytes);
    key.add(now.step_bytes);
    key.add(now.grain);
    key.add(now.cached_bytes);
    for (size_t i = 0; i < program.inputs.size(); i++) {
        const Input &in = program.inputs[i];
        if (in.kind == INPUT_tensor) {
            key.add(in, given[i].sizes, given[i].strides);
        } else if (in.kind == INPUT_int) {
            key.add(given[i].integer);
        } else {
            key.add(given[i].number);
        }
    }
    return key;
}

template <typename Encode> const char *timed(Encode encode)
{
    int64_t begin = timing ? nanoseconds() : 0;
    const char *error = encode();
    if (timing) {
        timings->push_back(nanoseconds() - begin);
    }
    return error;
}

const char *encode_whole(const Program &program, const Given *given, const Machine &now, Code &code)
{
    return timed([&] {
        fetch(program, code);
        return encode(program, given, now, code, {});
    });
}

} // namespace

const char *prepare(Fused *self, PyObject *const *args, Py_ssize_t n, Given *given, Code &code)
{
    const Program &program = *self->program;
    if (const char *error = take_all(program, args, n, given)) {
        return error;
    }
    const Machine now = machine_now();
    const MemoKey key = key_of(program, given, now);
    const Header &h = code.header;
    MemoPart head{&code.header, sizeof(Header)};
    auto rest = [&] {
        size_t n_outer = h.n_outer + h.n_inner ? h.n_slots : 0;
        return std::array<MemoPart, 6>{
            {{code.slots, h.n_slots * sizeof(Slot)},
             {code.outer, n_outer * sizeof(code.outer[0])},
             {code.constants, h.n_constants * sizeof(uint64_t)},
             {code.words, h.code_words * sizeof(uint64_t)},
             {code.outputs, program.outputs.size() * sizeof(Shape)},
             {&code.empty, sizeof(Code) - offsetof(Code, empty)}}};
    };
    if (self->memo->find(key, head, rest)) {
        return nullptr;
    }
    const char *error = encode_whole(program, given, now, code);
    if (!error && !code.empty) {
        self->memo->keep(key, head, rest);
    }
    return error;
}

const char *prepare_anew(Fused *self, PyObject *const *args, Py_ssize_t n, Given *given, Code &code)
{
    const Program &program = *self->program;
    const char *error = take_all(program, args, n, given);
    return error ? error : encode_whole(program, given, machine_now(), code);
}

int make_results(const Program &program, const Code &code, char **arguments, PyObject **made)
{
    size_t n = program.inputs.size();
    for (size_t o = 0; o < program.outputs.size(); o++) {
        const Output &out = program.outputs[o];
        made[o] = nullptr;
        if (!out.allocated()) {
            continue;
        }
        made[o] = new_tensor(out.ndim, code.outputs[o].sizes, code.outputs[o].strides,
                             program.nodes[out.node].dtype, &arguments[n + o]);
        if (!made[o]) {
            while (o-- > 0) {
                Py_XDECREF(made[o]);
            }
            return -1;
        }
    }
    return 0;
}

Py_ssize_t count_results(const Program &program)
{
    Py_ssize_t n = 0;
    for (const Output &out : program.outputs) {
        n += out.allocated();
    }
    return n;
}

void place_arguments(const Program &program, const Code &code, const Given *given,
                     char **arguments)
{
    size_t n = program.inputs.size();
    for (size_t i = 0; i < n; i++) {
        arguments[i] = given[i].data;
    }
    for (size_t o = program.outputs.size(); o-- > 0;) {
        const Output &out = program.outputs[o];
        char *whole = out.whole >= 0 ? given[out.whole].data
                                     : arguments[n + (out.into < 0 ? o : (size_t)out.into)];
        arguments[n + o] = whole + code.outputs[o].offset;
    }
}

namespace {

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

PyObject *as_tuple(const Program &program, PyObject *const *made)
{
    PyObject *result = PyTuple_New(count_results(program)); /* of none, if all are parts of an input */
    Py_ssize_t at = 0;
    for (size_t o = 0; result && o < program.outputs.size(); o++) {
        if (made[o]) {
            PyTuple_SET_ITEM(result, at++, Py_NewRef(made[o]));
        }
    }
    return result;
}

/* The result of a program that has one. */
PyObject *only(const Program &program, PyObject *const *made)
{
    return *std::find_if(made, made + program.outputs.size(), [](PyObject *one) { return one; });
}

/* Run what has been encoded; results have their addresses. 0, or what went wrong, see execute. */
int run(const Program &program, const Code &code, const Given *given, char **arguments)
{
    place_arguments(program, code, given, arguments);
    if (code.empty) {
        return 0;
    }
    PyThreadState *state = code.header.elements > 16384 ? PyEval_SaveThread() : nullptr;
    int status = execute(code, arguments);
    if (state) {
        PyEval_RestoreThread(state);
    }
    return status;
}

/* What `run` found, as an exception. */
PyObject *raise(int status)
{
    if (status & NO_MEMORY) {
        return PyErr_NoMemory();
    }
    if (status & OUT_OF_BOUNDS) {
        PyErr_SetString(PyExc_IndexError, "index out of range in self");
    } else {
        PyErr_SetString(PyExc_RuntimeError, "ZeroDivisionError");
    }
    return nullptr;
}

} // namespace

int tell_observer(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    PyObject *seen = PyTuple_New(n + 1);
    if (!seen) {
        return -1;
    }
    PyTuple_SET_ITEM(seen, 0, Py_NewRef(object));
    for (Py_ssize_t i = 0; i < n; i++) {
        PyTuple_SET_ITEM(seen, i + 1, Py_NewRef(args[i]));
    }
    int failed = PyList_Append(observer, seen);
    Py_DECREF(seen);
    return failed;
}

PyObject *fused_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *keywords)
{
    Fused *self = (Fused *)object;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    if (keywords && PyTuple_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "a fused operator takes no keywords");
        return nullptr;
    }
    if (observer && tell_observer(object, args, n)) {
        return nullptr;
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
    char *arguments[MAX_INPUTS + MAX_OUTPUTS];
    PyObject *made[MAX_OUTPUTS];
    if (make_results(program, code, arguments, made)) {
        return nullptr;
    }
    int status = run(program, code, given, arguments);
    PyObject *result = status                          ? nullptr
                       : count_results(program) == 1 ? Py_NewRef(only(program, made))
                                                     : as_tuple(program, made);
    for (size_t o = 0; o < program.outputs.size(); o++) {
        Py_XDECREF(made[o]);
    }
    if (status && !(status & NO_MEMORY) && self->fallback != Py_None) {
        return otherwise(self, nullptr, args, n); /* raises what torch raises, as torch says it */
    }
    return status ? raise(status) : result;
}

/* ---- panels ---- */

namespace {

/* The sizes of inputs of which a call takes a part. */
using Sizes = int64_t[MAX_DIMS];

/* Of each input but one, which comes as a panel, the part within the window. */
const char *narrow(const Program &program, const Window &window, int panel, Given *given,
                   Sizes *sizes)
{
    for (size_t i = 0; i < program.inputs.size(); i++) {
        const Input &in = program.inputs[i];
        Given &g = given[i];
        for (int k = 0; k < in.ndim; k++) {
            int w = 0;
            while (w < window.n && window.loop[w] != in.dims[k]) {
                w++;
            }
            bool tensor = in.kind == INPUT_tensor;
            int64_t size = tensor ? g.sizes[k] : g.integer;
            if (w == window.n || (size == 1 && (int)i != panel)) {
                continue; /* of another loop, or the same for all of this one */
            }
            if (size != ((int)i == panel ? window.count[w] : window.total[w])) {
                return "sizes do not agree";
            }
            if (!tensor) {
                g.integer = window.count[w];
            } else if ((int)i != panel) {
                if (g.sizes != sizes[i]) {
                    std::copy(g.sizes, g.sizes + in.ndim, sizes[i]);
                    g.sizes = sizes[i];
                }
                sizes[i][k] = window.count[w];
                g.data += window.first[w] * g.strides[k] * DTYPE_BYTES[in.dtype];
            }
        }
    }
    return nullptr;
}

/* The results that the first panel has made, and their addresses. */
const char *take_results(const Program &program, const Code &code, PyObject *tuple,
                         char **arguments)
{
    Py_ssize_t at = 0;
    for (size_t o = 0; o < program.outputs.size(); o++) {
        const Output &out = program.outputs[o];
        if (!out.allocated()) {
            continue;
        }
        Input like{};
        like.kind = INPUT_tensor;
        like.dtype = program.nodes[out.node].dtype;
        like.ndim = out.ndim;
        Given found;
        if (at >= PyTuple_GET_SIZE(tuple) || take(like, PyTuple_GET_ITEM(tuple, at++), found)) {
            return "results of another kind";
        }
        const Shape &shape = code.outputs[o];
        if (!std::equal(shape.sizes, shape.sizes + out.ndim, found.sizes) ||
            !std::equal(shape.strides, shape.strides + out.ndim, found.strides)) {
            return "results of another shape";
        }
        arguments[program.inputs.size() + o] = found.data;
    }
    return nullptr;
}

bool read_window(PyObject *tuple, int rank, Window &window)
{
    window.n = PyTuple_Check(tuple) ? (int)PyTuple_GET_SIZE(tuple) : 3;
    if (window.n > 2) {
        PyErr_SetString(PyExc_ValueError, "a window has at most two loops");
        return false;
    }
    for (int w = 0; w < window.n; w++) {
        long long first, count, total;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, w), "iLLL:window", &window.loop[w], &first,
                              &count, &total)) {
            return false;
        }
        if (window.loop[w] < 0 || window.loop[w] >= rank || first < 0 || count < 1 ||
            first > total - count) {
            PyErr_SetString(PyExc_ValueError, "a window beyond its loop");
            return false;
        }
        window.first[w] = first;
        window.count[w] = count;
        window.total[w] = total;
    }
    return true;
}

} // namespace

PyObject *fused_panel(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    const Program &program = *((Fused *)object)->program;
    Window window;
    if (nargs < 3) {
        PyErr_SetString(PyExc_TypeError, "panel(window, panel, results, *args)");
        return nullptr;
    }
    long panel = PyLong_AsLong(args[1]);
    PyObject *results = args[2];
    if (PyErr_Occurred() || !read_window(args[0], program.rank, window)) {
        return nullptr;
    }
    Given given[MAX_INPUTS];
    Sizes sizes[MAX_INPUTS];
    char *arguments[MAX_INPUTS + MAX_OUTPUTS];
    PyObject *made[MAX_OUTPUTS];
    CodeClaim claim;
    if (!claim.get()) {
        return PyErr_NoMemory();
    }
    Code &code = *claim.get();
    const char *error = observer ? "observed calls are whole" : nullptr;
    error = error ? error : take_all(program, args + 3, nargs - 3, given);
    error = error ? error : narrow(program, window, (int)panel, given, sizes);
    error = error ? error : timed([&] {
        return encode(program, given, machine_now(), code, window);
    });
    if (!error && results != Py_None) {
        error = PyTuple_Check(results) ? take_results(program, code, results, arguments)
                                       : "results are a tuple";
    }
    if (error) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(not_encodable, error);
        }
        return nullptr;
    }
    if (results != Py_None) {
        int status = run(program, code, given, arguments);
        return status ? raise(status) : Py_NewRef(results);
    }
    if (make_results(program, code, arguments, made)) {
        return nullptr;
    }
    int status = run(program, code, given, arguments);
    PyObject *tuple = status ? raise(status) : as_tuple(program, made);
    for (size_t o = 0; o < program.outputs.size(); o++) {
        Py_XDECREF(made[o]);
    }
    return tuple;
}

} // namespace magjit_dvm
