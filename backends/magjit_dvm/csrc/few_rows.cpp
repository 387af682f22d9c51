/* linear(x, weight[, bias]) of few rows: the machine's own kernels, where they are faster than what
 * torch calls; torch's operator for anything else. */
#include <algorithm>

#include "module.h"
#include "operand.h"

namespace magjit_dvm {

namespace {

PyObject *by_torch;

/* Measured. Elements of the matrix below which a second core does not pay; elements of x that are
 * worth reading again and again, which of many rows is done more often. */
constexpr int64_t SHARE = 1 << 16, MOST_READ = 1 << 15, MANY = 8;

/* The rows of x, and the distance between them; 0: they do not lie at one distance. */
int64_t rows_of(const Operand &x, int64_t *stride)
{
    int64_t rows = 1;
    *stride = x.ndim > 1 ? x.strides[x.ndim - 2] : x.sizes[0];
    for (int64_t d = x.ndim - 2; d >= 0; d--) {
        if (x.sizes[d] > 1 && rows > 1 && x.strides[d] != rows * *stride) {
            return 0;
        }
        if (x.sizes[d] > 1 && rows == 1) {
            *stride = x.strides[d];
        }
        rows *= x.sizes[d];
    }
    return rows;
}

/* Whether the kernels are to compute it. */
bool suits(const Operand &x, const Operand &w, const Operand *bias, FewRows &job)
{
    if (w.ndim != 2 || w.sizes[1] != x.sizes[x.ndim - 1] || !kernels().few_rows) {
        return false;
    }
    if (bias && (bias->ndim != 1 || bias->sizes[0] != w.sizes[0])) {
        return false;
    }
    job.rows = rows_of(x, &job.x_stride);
    job.width = w.sizes[0];
    job.depth = w.sizes[1];
    job.x = x.data;
    job.w = w.data;
    job.bias = bias ? bias->data : nullptr;
    job.w_stride = w.strides[0];
    return job.rows >= 1 && job.rows <= kernels().most_rows && job.width > 0 && job.depth >= 16 &&
           job.rows * job.depth <= (job.rows > MANY ? MOST_READ / 2 : MOST_READ) && job.w_stride >= job.depth &&
           job.x_stride >= job.depth;
}

void share(void *data, int64_t core, int64_t cores)
{
    const FewRows &job = *(FewRows *)data;
    int64_t each = (job.width + cores - 1) / cores;
    each = (each + 15) / 16 * 16; /* no cache line is written by two */
    int64_t first = std::min(job.width, each * core), last = std::min(job.width, first + each);
    kernels().few_rows(job, first, last);
}

} // namespace

PyObject *py_linear_by(PyObject *, PyObject *function)
{
    Py_XSETREF(by_torch, Py_NewRef(function));
    Py_RETURN_NONE;
}

PyObject *linear_call(PyObject *, PyObject *const *args, Py_ssize_t nargs)
{
    Operand x, w, bias;
    FewRows job;
    bool biased = nargs == 3 && args[2] != Py_None;
    bool known = (nargs == 2 || nargs == 3) && take_floats(args[0], x) && take_floats(args[1], w) &&
                 (!biased || take_floats(args[2], bias));
    if (!known || !suits(x, w, biased ? &bias : nullptr, job)) {
        if (PyErr_Occurred()) {
            return nullptr;
        }
        if (!by_torch) {
            PyErr_SetString(PyExc_RuntimeError, "linear is called before linear_by");
            return nullptr;
        }
        return PyObject_Vectorcall(by_torch, args, (size_t)nargs, nullptr);
    }
    int64_t sizes[MAX_DIMS], strides[MAX_DIMS], stride = 1;
    std::copy(x.sizes, x.sizes + x.ndim, sizes);
    sizes[x.ndim - 1] = job.width;
    for (int64_t d = x.ndim - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= sizes[d];
    }
    PyObject *made = new_tensor((int)x.ndim, sizes, strides, DT_f32, (char **)&job.out);
    if (!made) {
        return nullptr;
    }
    int64_t elements = job.width * job.depth;
    int64_t cores = std::clamp<int64_t>(elements / SHARE, 1, threads_now());
    PyThreadState *state = elements > (1 << 20) ? PyEval_SaveThread() : nullptr;
    on_cores((int)cores, share, &job);
    if (state) {
        PyEval_RestoreThread(state);
    }
    return made;
}

} // namespace magjit_dvm
