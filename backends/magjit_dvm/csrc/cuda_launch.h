/* Launches on NVIDIA GPUs, for the Python module. */
#ifndef MAGJIT_DVM_CUDA_LAUNCH_H
#define MAGJIT_DVM_CUDA_LAUNCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace magjit_dvm {

/* One launch; `parameter` is the kernel's, all 4 KB of it, aligned to 16 bytes, of which the first
 * `n_bytes` are read. */
struct Launch {
    uint64_t function;
    unsigned blocks, threads, shared;
    void *stream;
    char *parameter;
    int n_bytes;
    uint64_t counters, n_counters; /* see py_cuda_launch */
};

/* On the device whose kernel it is, whatever device is current. −1 with DeviceError set. */
int launch(const Launch &one);

/* Whether what is launched into a stream becomes part of a graph; −1 with DeviceError set. */
int is_captured(void *stream);

/* cuda_load(device, cubin, name, shared, overlaps): a kernel's handle in the device's primary context;
 * whether it waits by itself for what came before in its stream. */
PyObject *py_cuda_load(PyObject *, PyObject *args);

/* cuda_launch(function, blocks, threads, shared, stream, image, patches, addresses, counters,
 * n_counters): `patches` say where addresses go in the image; `counters` are pairs of 32-bit zeros in
 * the device's memory; with none, tiles are shared out evenly. */
PyObject *py_cuda_launch(PyObject *, PyObject *args);

/* Adds DeviceError. */
int add_cuda(PyObject *module);

} // namespace magjit_dvm

#endif
