/* Stacks on NVIDIA GPUs (DVM, §5): fused operators that do not depend on one another in one launch.
 *
 * Its parameter is several images behind one another; each has blocks of its own, which the GPU runs
 * side by side, or one after another on the same multiprocessor where there are more than it has. */
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "cuda_calls.h"
#include "cuda_gpus.h"
#include "cuda_launch.h"
#include "module.h"
#include "stack_members.h"

namespace magjit_dvm {

using namespace cuda;

namespace {

struct Member {
    CudaFused *self;
    PyObject *const *args;
    Py_ssize_t n;
    Argument given[MAX_INPUTS];
    Encoded encoded;
    CudaResults results;

    /* Operators whose tiles are drawn fill the GPU by themselves. */
    bool may_join() const { return encoded.verdict == ENCODED && !encoded.draws; }
};

/* As in shell.py. */
struct Parameter {
    uint32_t end[MAX_STACK], at[MAX_STACK];
    char images[IMAGE_BYTES - 8 * MAX_STACK];
};
static_assert(sizeof(Parameter) == IMAGE_BYTES && MAX_STACK == 8, "as the kernel reads it");

/* Members of one launch. */
struct Joined {
    Member *members[MAX_STACK];
    int count = 0;
    alignas(16) Parameter parameter{};
    int n_bytes = offsetof(Parameter, images);
    Launch launch{};

    bool has_room(const Member &member) const
    {
        const Member &first = *members[0];
        return member.may_join() && member.encoded.each == first.encoded.each &&
               member.self->approximate == first.self->approximate &&
               n_bytes + member.encoded.n_bytes <= IMAGE_BYTES;
    }
    void add(Member &member)
    {
        const Encoded &encoded = member.encoded;
        launch.blocks += (unsigned)encoded.blocks;
        launch.threads = std::max(launch.threads, (unsigned)encoded.threads);
        launch.shared = std::max(launch.shared, (unsigned)encoded.shared_bytes);
        parameter.end[count] = launch.blocks;
        parameter.at[count] = (uint32_t)n_bytes;
        members[count++] = &member;
        n_bytes += encoded.n_bytes;
    }
    int run(int device, uint64_t function)
    {
        if (current_stream(members[0]->self->device_type, device, &launch.stream)) {
            return -1;
        }
        for (int k = 0; k < count; k++) {
            Encoded &encoded = members[k]->encoded;
            write_addresses(encoded, members[k]->results.addresses);
            memcpy((char *)&parameter + parameter.at[k], encoded.image, (size_t)encoded.n_bytes);
        }
        launch.function = function;
        launch.parameter = (char *)&parameter;
        launch.n_bytes = n_bytes;
        if (magjit_dvm::launch(launch)) {
            return -1;
        }
        PartsToAdd sums;
        for (int k = 0; k < count; k++) {
            sums.of(members[k]->self, members[k]->encoded, members[k]->results.addresses);
        }
        return sums.launch(device, launch.stream);
    }
};

bool is_operator(PyObject *object)
{
    return is_cuda_fused(object) && ((CudaFused *)object)->program;
}

/* Whether all have words, on one GPU; an exception may be set where not. */
bool encode_all(Member *members, Py_ssize_t n, int &device)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        Member &member = members[i];
        int on;
        const char *reason = nullptr;
        Taken taken = take_arguments(member.self, member.args, member.n, member.self->device_type,
                                     member.given, on, reason);
        if (taken != TAKEN || on < 0 || (i && on != device) || !gpus[on].known) {
            return false;
        }
        device = on;
        encode_timed(*member.self->prepared, member.given, gpus[device].machine, member.encoded);
        bool known = member.encoded.verdict == ENCODED || member.encoded.verdict == NOTHING;
        if (!known || member.encoded.few_rows) {
            return false;
        }
    }
    return true;
}

/* Each in the first launch that has room for it. */
int launch_all(Member *members, Py_ssize_t n, int device)
{
    bool done[MAX_STACK] = {};
    for (Py_ssize_t i = 0; i < n; i++) {
        Member &first = members[i];
        if (done[i] || first.encoded.verdict != ENCODED) {
            continue;
        }
        Joined joined;
        joined.add(first);
        for (Py_ssize_t k = i + 1; k < n && first.may_join(); k++) {
            if (!done[k] && joined.has_room(members[k])) {
                joined.add(members[k]);
                done[k] = true;
            }
        }
        uint64_t function = 0;
        if (joined.count > 1) {
            function = kernel_of(device, first.encoded.each, first.self->approximate, STACKED);
            if (PyErr_Occurred()) {
                return -1;
            }
        }
        if (function) {
            if (joined.run(device, function)) {
                return -1;
            }
            continue;
        }
        for (int k = 0; k < joined.count; k++) {
            Member &one = *joined.members[k];
            if (launch_image(one.self, one.encoded, one.results.addresses, device)) {
                return -1;
            }
        }
    }
    return 0;
}

} // namespace

PyObject *cuda_stacked_call(PyObject *tuple, PyObject *const *args, Py_ssize_t nargs)
{
    Member members[MAX_STACK];
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    if (!read_members(tuple, args, nargs, members, is_operator)) {
        return nullptr;
    }
    int device = -1;
    if (!encode_all(members, n, device)) {
        return PyErr_Occurred() ? nullptr : call_apart(members, n);
    }
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        Member &one = members[i];
        if (!allocate_results(one.self, one.given, one.encoded, device, one.results)) {
            return nullptr;
        }
        count += one.results.count;
    }
    if (launch_all(members, n, device)) {
        return nullptr;
    }
    PyObject *all = PyTuple_New(count);
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; all && i < n; i++) {
        for (int k = 0; k < members[i].results.count; k++) {
            PyTuple_SET_ITEM(all, at++, Py_NewRef(members[i].results.made[k]));
        }
    }
    return all;
}

} // namespace magjit_dvm
