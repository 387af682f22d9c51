/* GPUs as calls know them: sizes, kernels, streams. */
#ifndef MAGJIT_DVM_CUDA_GPUS_H
#define MAGJIT_DVM_CUDA_GPUS_H

#include "cuda_encoder.h"

namespace magjit_dvm {

enum : int { MAX_GPUS = 64, N_KERNELS = 9 };
enum : int { SUMS = 1, SUMS_COLUMNS = 8, SUMS_THREADS = 512 }; /* as in cuda/parts.py */

using cuda::Form;

struct Gpu {
    bool known;
    cuda::Device machine;
    uint64_t counters, n_counters;
    uint64_t kernels[cuda::N_FORMS][N_KERNELS][2]; /* of R / 8; approximate */
    uint64_t sums;                                 /* adds up parts: see cuda/parts.py */
};

extern Gpu gpus[MAX_GPUS];
extern PyObject *allocate_hook; /* see py_cuda_hooks */

bool is_known(int device); /* after it has been asked for; false with an exception */

/* A kernel's handle, after which the GPU is known; 0 with an exception set, or without one, where
 * nobody waits: it is being compiled, or cannot be. */
uint64_t kernel_of(int device, int each, bool approximate, Form form, bool waits = true);
uint64_t kernel_of_sums(int device, bool waits = true);

/* torch's current stream; −1 with an exception set. */
int current_stream(int32_t device_type, int device, void **stream);

/* The sizes of a GPU, as plan.py's Machine has them. −1 with an exception set. */
int read_device(PyObject *tuple, cuda::Device &machine);

/* cuda_hooks(kernel, allocate): what Python does when it is asked. kernel(device, R, approximate,
 * form, waits) is a kernel's handle, or 0, and tells of the device by cuda_gpu; with R = 0 it only
 * does that.
 * allocate(sizes, strides, dtype, device) is a tensor, or raises as torch does; device −1 is the CPU. */
PyObject *py_cuda_hooks(PyObject *, PyObject *args);

/* cuda_gpu(device, machine, counters, n_counters): tells of a GPU; see plan.py of Machine. */
PyObject *py_cuda_gpu(PyObject *, PyObject *args);

} // namespace magjit_dvm

#endif
