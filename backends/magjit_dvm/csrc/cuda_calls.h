/* Calls of fused operators on NVIDIA GPUs, for the Python module. */
#ifndef MAGJIT_DVM_CUDA_CALLS_H
#define MAGJIT_DVM_CUDA_CALLS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "cuda_encoder.h"
#include "memo.h"

namespace magjit_dvm {

struct Split; /* see cuda_split.cpp */

struct CudaFused {
    PyObject_HEAD
    vectorcallfunc call;
    Program *program; /* NULL: calls go to Python */
    cuda::Prepared *prepared;
    Memo *memo;
    PyObject *fallback; /* called with the same arguments where there are no words; or None */
    int32_t device_type;
    int home; /* the GPU of a program that takes no tensor, or −1 */
    bool approximate; /* the GPU's own tanh and quotients */
    bool asked;       /* for steps, which are in `split` if there are any */
    Split *split;
};

bool is_cuda_fused(PyObject *object);

/* stacked(members, *args) of operators on a GPU, where a whole number in a tensor's place is that of a
 * result of the members before, counted from 0: see cuda_stacks.cpp. */
PyObject *cuda_stacked_call(PyObject *members, PyObject *const *args, Py_ssize_t nargs);

/* cuda_spans(): of each launch since the last time it was asked, while `timing` was on, nanoseconds of
 * taking arguments, encoding, allocating results, putting addresses into words, and the driver. */
PyObject *py_cuda_spans(PyObject *, PyObject *);

/* Adds CudaFused. */
int add_cuda_fused(PyObject *module);

/* cuda_pair(plan, given, ending, numbers, shapes): two launches one behind the other.
 * plan: the GPU, both kernels, blocks of each, threads, how many float32 the first leaves to the second,
 * and the sizes that each is told. given, ending: the tensors whose addresses each has, None for 0, of
 * `ending` also numbers of results. numbers: what the second is told besides. shapes: of each result its
 * dtype and sizes, of two results or more. None where a tensor is not a plain one on that GPU: nothing has been launched. */
PyObject *cuda_pair(PyObject *, PyObject *const *args, Py_ssize_t n);

/* ---- parts of a call ---- */

/* A tensor. Where torch's allocator refuses, Python asks it again, for torch's own exception. */
PyObject *new_memory(int32_t device_type, int ndim, const Shape &layout, DType dtype, int device,
                     char **data);

enum Taken : uint8_t { TAKEN, NOT_TAKEN, TO_PYTHON };

/* What a call gives, and the one GPU of its tensors, of none the program's own; where it is not
 * taken, the reason. */
Taken take_arguments(const CudaFused *self, PyObject *const *args, Py_ssize_t n, int32_t device_type,
                     cuda::Argument *given, int &device, const char *&reason);

/* All that `encode` asks of the arguments of a call. False: it refuses them. */
bool read_key(const Program &program, const cuda::Argument *given, const cuda::Device &machine,
              MemoKey &key);

/* `encode`, or what is kept of it; told of to who asks for times. */
void encode_call(const CudaFused *self, const cuda::Argument *given, const cuda::Device &machine,
                 cuda::Encoded &encoded);

/* The results of a call, owned until they are taken, and where all its tensors lie. */
struct CudaResults {
    PyObject *made[MAX_OUTPUTS];
    int count = 0;
    PyObject *parts = nullptr; /* of sums: what the stream has in its queue comes before whoever gets
                                * this memory next */
    uint64_t addresses[MAX_INPUTS + MAX_OUTPUTS + 1] = {}; /* the last: parts of sums */

    CudaResults() = default;
    CudaResults(const CudaResults &) = delete;
    ~CudaResults()
    {
        for (int k = 0; k < count; k++) {
            Py_DECREF(made[k]);
        }
        Py_XDECREF(parts);
    }
    PyObject *take();
};

/* False with an exception where there is no memory. */
bool allocate_results(const CudaFused *self, const cuda::Argument *given,
                      const cuda::Encoded &encoded, int device, CudaResults &results);

/* Into an image's words. */
void write_addresses(cuda::Encoded &encoded, const uint64_t *addresses);

/* The call in steps, of rows that are few and long. NULL without an exception: there are none, or
 * their kernels are `awaited`. */
PyObject *call_in_steps(CudaFused *self, const cuda::Argument *given, int device, bool &awaited);
int visit_steps(CudaFused *self, visitproc visit, void *arg);
void clear_steps(CudaFused *self);

/* Whether an image can be launched now, or whoever calls has no other way than to wait for its
 * kernels; where not, they are being compiled, or an exception is set. */
bool may_launch(const CudaFused *self, const cuda::Encoded &encoded, int device);

/* Writes addresses and runs an image. −1 with an exception. */
int launch_image(const CudaFused *self, cuda::Encoded &encoded, const uint64_t *addresses,
                 int device);

/* The second launch of sums across rows: what blocks have left is added up. */
class PartsToAdd {
public:
    void of(const CudaFused *self, const cuda::Encoded &encoded, const uint64_t *addresses);
    int launch(int device, void *stream); /* nothing, if there are none */

private:
    struct Sum {
        uint64_t parts, to;
        uint32_t rows, cols, what, end; /* blocks of it and those before */
    };
    static_assert(sizeof(Sum) == 32, "as parts.py packs it");
    alignas(16) Sum sums[cuda::IMAGE_BYTES / sizeof(Sum)]; /* the driver may read all of it */
    static_assert(sizeof(sums) / sizeof(Sum) >= MAX_STACK * cuda::MOST_SUMS);
    int count = 0;
    uint32_t blocks = 0;
};

} // namespace magjit_dvm

#endif
