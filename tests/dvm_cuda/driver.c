/* A driver that keeps what it is asked to launch, for machines without one. Devices are numbers, and
 * so are kernels: the last number in their names. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;

unsigned char kept_parameter[4096], parameter_before[4096]; /* of the last launch, and the one before */
uint64_t kept[8]; /* launches, function, blocks, threads, shared bytes, stream, context, changes */
int refusal;
int refuses_parts;  /* parameters of fewer bytes than the kernel's are refused */
int refuses_overlap; /* launches that may begin early are refused */
int overlapped;      /* launches that might */
int capturing_now;   /* streams say that they are captured */
int capture_mode;    /* of this thread; 2 where a capture elsewhere forbids nothing */
int mode_of_load;    /* the one in which a module was loaded last */
uint64_t kept_size; /* bytes of the last parameter */
void (*launched)(void); /* called after each launch */

static void *current;

static void *pointer(uint64_t number) { return (void *)(uintptr_t)number; }

Result cuGetErrorName(Result result, const char **name)
{
    *name = result == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : 0;
    return 0;
}
Result cuGetErrorString(Result result, const char **text)
{
    *text = result == 719 ? "unspecified launch failure" : 0;
    return 0;
}
Result cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = pointer(0x1000 + (uint64_t)device);
    return 0;
}
Result cuCtxGetCurrent(void **context)
{
    *context = current;
    return 0;
}
Result cuCtxSetCurrent(void *context)
{
    current = context;
    kept[7]++;
    return 0;
}
Result cuModuleLoadData(void **module, const void *image)
{
    *module = pointer(*(const unsigned char *)image);
    mode_of_load = capture_mode;
    return 0;
}
Result cuModuleGetFunction(void **function, void *module, const char *name)
{
    const char *last = strrchr(name, '_');
    *function = pointer((uint64_t)atoi(last + 1) + 1000 * (uint64_t)(uintptr_t)module);
    return 0;
}
Result cuFuncSetAttribute(void *function, int attribute, int value)
{
    (void)function, (void)attribute, (void)value;
    return 0;
}
Result cuStreamIsCapturing(void *stream, int *capturing)
{
    (void)stream;
    *capturing = capturing_now;
    return 0;
}
Result cuThreadExchangeStreamCaptureMode(int *mode)
{
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return 0;
}
Result cuLaunchKernel(void *function, unsigned blocks, unsigned y, unsigned z, unsigned threads,
                      unsigned ty, unsigned tz, unsigned shared, void *stream, void **parameters,
                      void **extra)
{
    (void)y, (void)z, (void)ty, (void)tz;
    if (extra && refuses_parts) {
        return 1;
    }
    const void *parameter = extra ? extra[1] : parameters[0];
    kept_size = extra ? *(size_t *)extra[3] : sizeof(kept_parameter);
    memcpy(parameter_before, kept_parameter, sizeof(kept_parameter));
    memset(kept_parameter, 0xa5, sizeof(kept_parameter)); /* what is not copied is anything */
    kept[0]++;
    kept[1] = (uint64_t)(uintptr_t)function;
    kept[2] = blocks;
    kept[3] = threads;
    kept[4] = shared;
    kept[5] = (uint64_t)(uintptr_t)stream;
    kept[6] = (uint64_t)(uintptr_t)current;
    memcpy(kept_parameter, parameter, kept_size);
    if (launched) {
        launched();
    }
    return refusal;
}

struct Config {
    unsigned blocks[3], threads[3], shared;
    void *stream;
    const int *attributes; /* of 72 bytes */
    unsigned n_attributes;
};
Result cuLaunchKernelEx(const struct Config *config, void *function, void **parameters, void **extra)
{
    if (refuses_overlap || config->n_attributes != 1 || config->attributes[0] != 6 ||
        config->attributes[2] != 1) {
        return 801;
    }
    Result result =
        cuLaunchKernel(function, config->blocks[0], config->blocks[1], config->blocks[2],
                       config->threads[0], config->threads[1], config->threads[2], config->shared,
                       config->stream, parameters, extra);
    overlapped += result == 0;
    return result;
}
