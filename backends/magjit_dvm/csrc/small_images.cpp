/* convolution(...) of small images: the machine's own kernels, where what torch calls spends more on
 * getting ready than on computing; torch's operator for anything else. */
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "module.h"
#include "operand.h"

namespace magjit_dvm {

namespace {

PyObject *by_torch;

/* Elements of images in frames; products of one sum, which is rounded after each. */
constexpr int64_t MOST_FRAMED = 1 << 18, MOST_DEPTH = 1 << 10, WIDEST_KERNEL = 7;
constexpr int64_t SHARE = 1 << 19; /* products below which a second core does not pay */

/* The images in their frames, kept for the thread's next call. */
struct Framed {
    float *memory = nullptr;
    size_t size = 0;
    float *at_least(size_t want)
    {
        if (want > size) {
            std::free(memory);
            size = (want + 4095) / 4096 * 4096;
            memory = (float *)std::aligned_alloc(64, size);
            size = memory ? size : 0;
        }
        return memory;
    }
    ~Framed() { std::free(memory); }
};
thread_local Framed framed;

/* A list or tuple of two ints. */
bool two_ints(PyObject *object, int64_t *found)
{
    bool list = PyList_CheckExact(object);
    if ((!list && !PyTuple_CheckExact(object)) || Py_SIZE(object) != 2) {
        return false;
    }
    for (int i = 0; i < 2; i++) {
        PyObject *item = list ? PyList_GET_ITEM(object, i) : PyTuple_GET_ITEM(object, i);
        if (!PyLong_CheckExact(item)) {
            return false;
        }
        int overflow;
        found[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow) {
            return false;
        }
    }
    return true;
}

/* stride, padding, dilation, transposed, output_padding, groups: the padding of a plain one. */
bool is_plain(PyObject *const *args, int64_t *padding)
{
    int64_t stride[2], dilation[2], further[2];
    if (!two_ints(args[0], stride) || !two_ints(args[1], padding) || !two_ints(args[2], dilation) ||
        !two_ints(args[4], further) || args[3] != Py_False || !PyLong_CheckExact(args[5])) {
        return false;
    }
    int overflow;
    long groups = PyLong_AsLongAndOverflow(args[5], &overflow);
    return groups == 1 && !overflow && stride[0] == 1 && stride[1] == 1 && dilation[0] == 1 &&
           dilation[1] == 1 && further[0] == 0 && further[1] == 0;
}

bool is_contiguous(const Operand &one)
{
    int64_t stride = 1;
    for (int64_t d = one.ndim; d-- > 0; stride *= one.sizes[d]) {
        if (one.strides[d] != stride) {
            return false;
        }
    }
    return true;
}

int64_t rounded(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

/* Whether the kernels are to compute it. */
bool suits(const Operand &x, const Operand &w, const Operand *bias, const int64_t *padding,
           SmallImages &job)
{
    const Kernels &k = kernels();
    if (!k.small_images || x.ndim != 4 || w.ndim != 4 || x.sizes[1] != w.sizes[1] ||
        !is_contiguous(x) || !is_contiguous(w)) {
        return false;
    }
    job.images = x.sizes[0];
    job.channels = x.sizes[1];
    job.outputs = w.sizes[0];
    job.kernel_height = w.sizes[2];
    job.kernel_width = w.sizes[3];
    if (bias && (bias->ndim != 1 || bias->sizes[0] != job.outputs)) {
        return false;
    }
    for (int i = 0; i < 2; i++) {
        int64_t size = w.sizes[2 + i];
        if (size < 1 || size > WIDEST_KERNEL || padding[i] < 0 || padding[i] >= size ||
            x.sizes[2 + i] < 1 || x.sizes[2 + i] > 256) {
            return false;
        }
    }
    job.height = x.sizes[2] + 2 * padding[0] - job.kernel_height + 1;
    job.width = x.sizes[3] + 2 * padding[1] - job.kernel_width + 1;
    if (job.images < 1 || job.channels < 1 || job.outputs < 1 || job.height < 1 || job.width < 1 ||
        job.images > 64 || job.channels > 4096 || job.outputs > 4096) {
        return false;
    }
    int64_t each = job.channels * job.kernel_height * job.kernel_width;
    int64_t rows = rounded(job.height, k.image_rows), columns = rounded(job.width, k.image_columns);
    job.pitch = columns + job.kernel_width - 1;
    job.plane = (rows + job.kernel_height - 1) * job.pitch;
    job.x = x.data;
    job.w = w.data;
    job.bias = bias ? bias->data : nullptr;
    /* Lanes beside the image are computed for nothing. */
    return each <= MOST_DEPTH && job.kernel_height * job.kernel_width > 1 &&
           job.images * job.outputs * rows * columns <= k.image_work / each &&
           job.images * job.channels * job.plane <= MOST_FRAMED &&
           rows * columns <= 2 * job.height * job.width;
}

/* Copy the images into frames of zeros. */
bool frame(const Operand &x, const int64_t *padding, SmallImages &job)
{
    size_t bytes = (size_t)(job.images * job.channels * job.plane) * sizeof(float);
    float *to = framed.at_least(bytes);
    if (!to) {
        return false;
    }
    memset(to, 0, bytes);
    const float *from = x.data;
    job.x = to;
    for (int64_t plane = 0; plane < job.images * job.channels; plane++, to += job.plane) {
        float *row = to + padding[0] * job.pitch + padding[1];
        for (int64_t y = 0; y < x.sizes[2]; y++, row += job.pitch, from += x.sizes[3]) {
            memcpy(row, from, (size_t)x.sizes[3] * sizeof(float));
        }
    }
    return true;
}

void share(void *data, int64_t core, int64_t cores)
{
    const SmallImages &job = *(SmallImages *)data;
    int64_t all = job.images * job.outputs, each = rounded((all + cores - 1) / cores, 4);
    int64_t first = std::min(all, each * core), last = std::min(all, first + each);
    while (first < last) {
        int64_t image = first / job.outputs, begin = first % job.outputs;
        int64_t end = std::min(job.outputs, begin + last - first);
        kernels().small_images(job, image, begin, end);
        first += end - begin;
    }
}

} // namespace

PyObject *py_convolution_by(PyObject *, PyObject *function)
{
    Py_XSETREF(by_torch, Py_NewRef(function));
    Py_RETURN_NONE;
}

PyObject *convolution_call(PyObject *, PyObject *const *args, Py_ssize_t nargs)
{
    Operand x, w, bias;
    SmallImages job;
    int64_t padding[2];
    bool biased = nargs == 9 && args[2] != Py_None;
    bool known = nargs == 9 && is_plain(args + 3, padding) && take_floats(args[0], x) &&
                 take_floats(args[1], w) && (!biased || take_floats(args[2], bias));
    if (!known || !suits(x, w, biased ? &bias : nullptr, padding, job)) {
        if (PyErr_Occurred()) {
            return nullptr;
        }
        if (!by_torch) {
            PyErr_SetString(PyExc_RuntimeError, "convolution is called before convolution_by");
            return nullptr;
        }
        return PyObject_Vectorcall(by_torch, args, (size_t)nargs, nullptr);
    }
    int64_t sizes[4] = {job.images, job.outputs, job.height, job.width}, strides[4];
    for (int64_t d = 4, stride = 1; d-- > 0; stride *= sizes[d]) {
        strides[d] = stride;
    }
    PyObject *made = new_tensor(4, sizes, strides, DT_f32, (char **)&job.out);
    if (!made) {
        return nullptr;
    }
    if (!frame(x, padding, job)) {
        Py_DECREF(made);
        return PyErr_NoMemory();
    }
    int64_t taps = job.channels * job.kernel_height * job.kernel_width;
    int64_t work = job.images * job.outputs * job.height * job.width * taps;
    int64_t cores = std::clamp<int64_t>(work / SHARE, 1, threads_now());
    /* The frame is this thread's; whoever else runs Python meanwhile has one of its own. */
    PyThreadState *state = work > (1 << 20) ? PyEval_SaveThread() : nullptr;
    on_cores((int)cores, share, &job);
    if (state) {
        PyEval_RestoreThread(state);
    }
    return made;
}

} // namespace magjit_dvm
