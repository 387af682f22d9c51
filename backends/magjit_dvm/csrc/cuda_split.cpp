/* Reductions of few long rows: steps in the place of one launch, each a program of its own, which
 * cuda/splitting.py makes. Here is what a call decides: how loops are divided into pieces.
 *
 * Loops that lie in memory as one, the outermost of those that are reduced, become so many pieces of
 * as many elements. What is left over is a piece more, by a launch of its own. */
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cuda_calls.h"
#include "cuda_gpus.h"
#include "module.h"

namespace magjit_dvm {

using namespace cuda;

struct OneStep {
    CudaFused *fused; /* Split has it */
    bool pieces;
    std::vector<int> sources, results, left_over; /* as cuda/splitting.py has them */
    std::unique_ptr<OneStep> joined;
};

struct Split {
    PyObject *made; /* the tuple of Python that has all steps */
    std::vector<OneStep> steps;
    int n_slots; /* of arguments, and of tensors between steps */
};

namespace {

/* Elements of a piece: a row of so many fits a block; of fewer, or more pieces, the rest of a launch is
 * no longer little beside them. A row has no more than MOST_PIECES. */
constexpr int64_t LONGEST = 8192, SHORTEST = 1024, MOST_PIECES = 30000;

bool read_numbers(PyObject *tuple, size_t n, std::vector<int> &numbers)
{
    if ((size_t)PyTuple_GET_SIZE(tuple) != n) {
        PyErr_SetString(PyExc_ValueError, "a step of other arguments");
        return false;
    }
    for (size_t k = 0; k < n; k++) {
        numbers.push_back((int)PyLong_AsLong(PyTuple_GET_ITEM(tuple, (Py_ssize_t)k)));
    }
    return !PyErr_Occurred();
}

/* A step as `DeviceFused.steps` has it; false with an exception. */
bool read_step(PyObject *made, OneStep &step, int &n_slots)
{
    PyObject *fused, *sources, *results, *left_over, *joined;
    int pieces;
    if (!PyArg_ParseTuple(made, "OpO!O!O!O:step", &fused, &pieces, &PyTuple_Type, &sources,
                          &PyTuple_Type, &results, &PyTuple_Type, &left_over, &joined)) {
        return false;
    }
    if (!is_cuda_fused(fused) || !((CudaFused *)fused)->program) {
        PyErr_SetString(PyExc_ValueError, "a step is a fused operator with a program");
        return false;
    }
    step.fused = (CudaFused *)fused;
    step.pieces = pieces != 0;
    const Program &program = *step.fused->program;
    size_t n_outputs = program.outputs.size();
    if (!read_numbers(sources, program.inputs.size(), step.sources) ||
        !read_numbers(results, n_outputs, step.results) ||
        !read_numbers(left_over, pieces ? n_outputs : 0, step.left_over)) {
        return false;
    }
    for (const auto *numbers : {&step.sources, &step.results, &step.left_over}) {
        for (int number : *numbers) {
            n_slots = std::max(n_slots, number + 1);
        }
    }
    if (joined == Py_None) {
        return true;
    }
    step.joined = std::make_unique<OneStep>();
    return read_step(joined, *step.joined, n_slots);
}

/* What Python makes of the program; false with an exception. */
bool read_steps(CudaFused *self, PyObject *made)
{
    auto split = std::make_unique<Split>();
    split->made = made;
    split->n_slots = (int)self->program->inputs.size();
    if (!PyTuple_Check(made) || !PyTuple_GET_SIZE(made)) {
        PyErr_SetString(PyExc_TypeError, "steps are a tuple");
        return false;
    }
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(made); k++) {
        OneStep step{};
        if (!read_step(PyTuple_GET_ITEM(made, k), step, split->n_slots)) {
            return false;
        }
        split->steps.push_back(std::move(step));
    }
    self->split = split.release();
    return true;
}

int ask_for_steps(CudaFused *self)
{
    PyObject *made = PyObject_CallMethod((PyObject *)self, "steps", nullptr);
    if (!made) {
        return -1;
    }
    if (made == Py_None || !read_steps(self, made)) {
        Py_DECREF(made);
        return PyErr_Occurred() ? -1 : 0;
    }
    return 0;
}

/* ---- pieces ---- */

/* How the loops of a call are divided. */
class Division {
public:
    Division(const Program &program, const Argument *given, const Device &machine)
        : program(program), given(given)
    {
        std::fill(size, size + MAX_DIMS, 1);
        for (size_t i = 0; i < program.inputs.size(); i++) {
            const Input &in = program.inputs[i];
            for (int k = 0; k < in.ndim && in.kind == INPUT_tensor; k++) {
                if (in.dims[k] >= 0 && given[i].sizes[k] != 1) {
                    size[in.dims[k]] = given[i].sizes[k];
                }
            }
        }
        for (const Node &node : program.nodes) {
            over |= node.kind == NODE_reduce ? node.mask : 0;
        }
        join();
        choose(machine.multiprocessors);
    }

    bool found() const { return pieces > 1; }

    /* Elements of these loops. */
    int64_t count(uint32_t loops) const
    {
        int64_t product = 1;
        for (int d = 0; d < program.rank; d++) {
            product *= loops >> d & 1 ? size[d] : 1;
        }
        return product;
    }

    /* An argument in pieces, or what is left over. */
    void take(int i, bool left_over, Shape &shape, Argument &value) const
    {
        const Input &in = program.inputs[i];
        int64_t step = stride(i, joined[n_joined - 1]);
        shape.sizes[0] = step && !left_over ? pieces : 1;
        shape.strides[0] = step * each;
        for (int k = 0; k < in.ndim; k++) {
            int64_t own = given[i].sizes[k];
            int d = in.dims[k];
            if (own != 1 && d >= 0 && is_joined(d)) {
                bool inner = d == joined[n_joined - 1];
                own = !inner ? 1 : left_over ? rest : each;
            }
            shape.sizes[k + 1] = own;
            shape.strides[k + 1] = given[i].strides[k];
        }
        value = given[i];
        value.sizes = shape.sizes;
        value.strides = shape.strides;
        if (left_over) {
            value.data += (uint64_t)(pieces * each * step * DTYPE_BYTES[in.dtype]);
        }
    }

    int64_t pieces = 0, rest = 0; /* and elements left over */

private:
    const Program &program;
    const Argument *given;
    int64_t size[MAX_DIMS], each = 1; /* of the innermost of those that are joined, in a piece */
    uint32_t over = 0;                /* loops that are reduced */
    int joined[MAX_DIMS], n_joined = 0; /* from the outermost inwards */

    bool is_joined(int d) const
    {
        return std::find(joined, joined + n_joined, d) != joined + n_joined;
    }

    /* How far apart elements are that follow one another along a loop; 0 where they are one. */
    int64_t stride(int i, int d) const
    {
        const Input &in = program.inputs[i];
        int64_t found = 0;
        for (int k = 0; k < in.ndim; k++) {
            found += in.dims[k] == d && given[i].sizes[k] != 1 ? given[i].strides[k] : 0;
        }
        return found;
    }

    /* Whether all operands have a loop's elements behind one another along the loop around it. */
    bool are_one(int outer, int inner) const
    {
        for (size_t i = 0; i < program.inputs.size(); i++) {
            if (program.inputs[i].kind == INPUT_tensor &&
                stride((int)i, outer) != size[inner] * stride((int)i, inner)) {
                return false;
            }
        }
        return true;
    }

    /* The operand that has most elements says in which order loops lie. */
    void join()
    {
        int largest = -1;
        int64_t most = 0;
        for (size_t i = 0; i < program.inputs.size(); i++) {
            int64_t elements = 1;
            for (int d = 0; d < program.rank; d++) {
                elements *= stride((int)i, d) ? size[d] : 1;
            }
            if (program.inputs[i].kind == INPUT_tensor && elements > most) {
                largest = (int)i;
                most = elements;
            }
        }
        int loops[MAX_DIMS], n = 0;
        for (int d = 0; d < program.rank; d++) {
            if (over >> d & 1 && size[d] > 1) {
                loops[n++] = d;
            }
        }
        std::stable_sort(loops, loops + n, [&](int a, int b) {
            return stride(largest, a) > stride(largest, b);
        });
        for (int k = 0; k < n && (!k || are_one(loops[k - 1], loops[k])); k++) {
            joined[n_joined++] = loops[k];
        }
    }

    /* How many pieces, of how many. */
    void choose(int64_t multiprocessors)
    {
        uint32_t along = 0;
        for (int k = 0; k < n_joined; k++) {
            along |= 1u << joined[k];
        }
        uint32_t kept = ((1u << program.rank) - 1) & ~over;
        int64_t rows = count(kept), all = count(along), within = count(over & ~along);
        if (!n_joined || rows > INT64_MAX / (all * within)) {
            return;
        }
        int64_t wanted = std::clamp(rows * all * within / multiprocessors, SHORTEST, LONGEST);
        wanted = std::max(wanted, all * within / MOST_PIECES);
        int64_t most = std::max<int64_t>(wanted / within, 1);
        each = divisor(all, most);
        if (each * within * 2 < wanted) { /* too short: something is left over */
            each = most >= 8 ? most / 8 * 8 : most;
        }
        pieces = all / each;
        rest = all % each;
    }

    /* The largest divisor of n that is no larger than `most`, of those without large prime factors. */
    static int64_t divisor(int64_t n, int64_t most)
    {
        int64_t found[256] = {1}, best = 1;
        int count = 1;
        for (int64_t prime : {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31}) {
            int before = count;
            int64_t power = 1;
            for (; n % prime == 0; n /= prime) {
                power *= prime;
                for (int k = 0; k < before && count < 256 && power <= most; k++) {
                    if (found[k] * power <= most) {
                        found[count++] = found[k] * power;
                        best = std::max(best, found[count - 1]);
                    }
                }
            }
        }
        return best;
    }
};

/* ---- a call ---- */

/* A tensor between two steps. */
struct Between {
    PyObject *tensor = nullptr;
    Shape shape;
    Argument value{};

    Between() = default;
    Between(const Between &) = delete;
    ~Between() { Py_XDECREF(tensor); }
};

class CallInSteps {
public:
    CallInSteps(CudaFused *self, const Argument *given, int device)
        : self(self), given(given), device(device),
          division(*self->program, given, gpus[device].machine),
          between((size_t)self->split->n_slots), made(self->program->outputs.size())
    {
    }

    bool awaited = false; /* kernels */

    PyObject *run()
    {
        if (!division.found()) {
            return nullptr;
        }
        for (const OneStep &step : self->split->steps) {
            if (!run(step)) {
                return nullptr;
            }
        }
        if (made.size() == 1) {
            return Py_NewRef(made[0].tensor);
        }
        PyObject *tuple = PyTuple_New((Py_ssize_t)made.size());
        for (size_t k = 0; tuple && k < made.size(); k++) {
            PyTuple_SET_ITEM(tuple, (Py_ssize_t)k, Py_NewRef(made[k].tensor));
        }
        return tuple;
    }

private:
    CudaFused *self;
    const Argument *given;
    int device;
    Division division;
    std::vector<Between> between, made;

    void take(const OneStep &step, bool left_over, Shape *shapes, Argument *values) const
    {
        const Program &program = *step.fused->program;
        int n_given = (int)self->program->inputs.size();
        for (size_t i = 0; i < step.sources.size(); i++) {
            int source = step.sources[i];
            if (source < 0) {
                int64_t count = division.count((uint32_t)(-1 - source));
                values[i] = {};
                values[i].floating = program.inputs[i].kind == INPUT_float;
                values[i].integer = count;
                values[i].number = (double)count;
            } else if (source >= n_given) {
                values[i] = between[(size_t)source].value;
            } else if (program.inputs[i].ndim != self->program->inputs[(size_t)source].ndim) {
                division.take(source, left_over, shapes[i], values[i]);
            } else {
                values[i] = given[source];
            }
        }
    }

    /* False with an exception, or without one where there are no words. */
    bool run(const OneStep &step)
    {
        const OneStep &one = division.rest && step.joined ? *step.joined : step;
        return launch(one, false, one.results) &&
               (!division.rest || !one.pieces || launch(one, true, one.left_over));
    }

    /* Whether a step may be launched now; with an exception, not. */
    bool is_there(const Encoded &encoded)
    {
        bool there = may_launch(self, encoded, device);
        awaited = !there;
        return there;
    }

    bool launch(const OneStep &step, bool left_over, const std::vector<int> &results)
    {
        CudaFused *fused = step.fused;
        Shape shapes[MAX_INPUTS];
        Argument values[MAX_INPUTS];
        take(step, left_over, shapes, values);
        Encoded encoded;
        encode_call(fused, values, gpus[device].machine, encoded);
        CudaResults found;
        if (encoded.verdict != ENCODED || !is_there(encoded) ||
            !allocate_results(fused, values, encoded, device, found) ||
            launch_image(fused, encoded, found.addresses, device)) {
            return false;
        }
        for (size_t o = 0; o < results.size(); o++) {
            int to = results[o];
            Between &one = to < 0 ? made[(size_t)(-1 - to)] : between[(size_t)to];
            one.tensor = Py_NewRef(found.made[o]);
            one.shape = encoded.layouts[o];
            one.value = {found.addresses[step.sources.size() + o], one.shape.sizes,
                         one.shape.strides, 0, 0, true, false};
        }
        return true;
    }
};

} // namespace

PyObject *call_in_steps(CudaFused *self, const Argument *given, int device, bool &awaited)
{
    if (!self->asked) {
        if (ask_for_steps(self)) {
            return nullptr;
        }
        self->asked = true;
    }
    if (!self->split) {
        return nullptr;
    }
    CallInSteps call(self, given, device);
    PyObject *made = call.run();
    awaited = call.awaited;
    return made;
}

int visit_steps(CudaFused *self, visitproc visit, void *arg)
{
    if (self->split) {
        Py_VISIT(self->split->made);
    }
    return 0;
}

void clear_steps(CudaFused *self)
{
    if (self->split) {
        PyObject *made = self->split->made;
        delete self->split;
        self->split = nullptr;
        Py_DECREF(made);
    }
}

} // namespace magjit_dvm
