/* Stacks on NVIDIA GPUs (DVM, §5, Figure 9): several fused operators in one launch.
 *
 * Its parameter is several images behind one another. In space: those that do not depend on one
 * another have blocks of their own, which the GPU runs side by side, or one after another on the same
 * multiprocessor where there are more than it has. In time: a small one that takes results of others
 * runs behind them in the same block, so that nobody waits for another multiprocessor. That saves the
 * host a launch; on the GPU a launch that begins early is sooner there than a block that begins again,
 * so that in a graph each of those is launched by itself. */
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

/* R of the kernel whose blocks run several images, as in cuda/interpreter.py; how many warps and
 * elements a block of it has at a time, as in stacking.py: of more, several blocks are faster. */
enum : int64_t { CHAINED = 8, WARPS = 16, OF_A_BLOCK = 32 * CHAINED * WARPS };

struct Member {
    CudaFused *self;
    PyObject *const *args; /* in the place of a tensor, the number of a result of a member before it */
    Py_ssize_t n;
    int16_t sources[MAX_INPUTS]; /* those numbers, or −1 */
    PyObject *own[MAX_INPUTS];   /* what it is called with; borrowed */
    uint32_t reads = 0;          /* members whose results it takes, a bit each */
    bool is_read = false;        /* by others */
    int launch = -1;             /* that it waits for */
    int chain = -1;              /* within it: the first member of those that share a block */
    Argument given[MAX_INPUTS];
    Encoded encoded;
    CudaResults results;

    /* Operators whose tiles are drawn fill the GPU by themselves; so do norms' gradients. Those, and
     * results in batches, have kernels that no stack has. */
    bool may_join() const
    {
        bool of_norms = encoded.form == cuda::ADDING || encoded.form == cuda::GRADIENTS;
        bool in_batches = encoded.form == cuda::BATCHED || encoded.form == cuda::READ_ONCE;
        return encoded.verdict == ENCODED && !encoded.draws && !of_norms && !in_batches;
    }
    /* Whether a block has all of it at a time that several have now. */
    bool fits_a_block() const
    {
        int64_t warps = encoded.blocks * (encoded.threads / 32 - 1);
        bool small = encoded.elements <= OF_A_BLOCK && warps <= WARPS;
        return may_join() && small && encoded.each == CHAINED && !encoded.n_sums;
    }
    bool may_chain() const { return fits_a_block() && encoded.blocks == 1; }
};

/* As in shell.py. */
struct Parameter {
    uint32_t end[MAX_STACK], at[MAX_STACK];
    char images[IMAGE_BYTES - 8 * MAX_STACK];
};
static_assert(sizeof(Parameter) == IMAGE_BYTES && MAX_STACK == 8, "as the kernel reads it");

/* Members of one launch, in their order. */
class Joined {
public:
    /* Whether it may have a member as well, in blocks of others or in blocks of its own. */
    bool has_room(const Member &member, bool behind, const Device &machine) const
    {
        const Member &first = *members[0];
        int64_t shared = shared_with(member.encoded.shared_bytes, chained || behind);
        return member.may_join() && first.may_join() &&
               member.encoded.each == first.encoded.each &&
               member.self->approximate == first.self->approximate &&
               n_bytes + member.encoded.n_bytes <= IMAGE_BYTES && shared <= machine.shared_bytes;
    }
    void add(Member &member, int chain, bool behind)
    {
        member.chain = chain;
        members[count++] = &member;
        n_bytes += member.encoded.n_bytes;
        widest = std::max(widest, member.encoded.shared_bytes);
        chained |= behind;
    }
    int run(int device)
    {
        uint64_t function = 0;
        if (count > 1) {
            const Member &first = *members[0];
            function = kernel_of(device, first.encoded.each, first.self->approximate, STACKED);
            if (PyErr_Occurred()) {
                return -1;
            }
        }
        int failed = function ? run_together(device, function) : run_apart(device);
        for (int k = 0; k < count; k++) {
            members[k]->launch = -1;
        }
        return failed;
    }

private:
    Member *members[MAX_STACK];
    int count = 0, n_bytes = offsetof(Parameter, images);
    int64_t widest = 0; /* bytes of shared memory that a member asks for */
    bool chained = false;

    /* Where blocks run several images, the programs are in shared memory behind what each has. */
    int64_t shared_with(int64_t bytes, bool chains) const
    {
        bytes = std::max(widest, bytes);
        return chains ? (bytes + 127) / 128 * 128 + (int64_t)sizeof(Parameter) : bytes;
    }
    int run_apart(int device)
    {
        for (int k = 0; k < count; k++) {
            Member &one = *members[k];
            if (launch_image(one.self, one.encoded, one.results.addresses, device)) {
                return -1;
            }
        }
        return 0;
    }
    int run_together(int device, uint64_t function)
    {
        std::stable_sort(members, members + count,
                         [](Member *a, Member *b) { return a->chain < b->chain; });
        alignas(16) Parameter parameter{};
        Launch all{};
        if (current_stream(members[0]->self->device_type, device, &all.stream)) {
            return -1;
        }
        all.n_bytes = offsetof(Parameter, images);
        all.shared = (unsigned)shared_with(0, chained);
        for (int k = 0; k < count; k++) {
            Encoded &one = members[k]->encoded;
            if (k == 0 || members[k]->chain != members[k - 1]->chain) {
                all.blocks += (unsigned)one.blocks;
            }
            all.threads = std::max(all.threads, (unsigned)one.threads);
            parameter.end[k] = all.blocks;
            parameter.at[k] = (uint32_t)all.n_bytes;
            write_addresses(one, members[k]->results.addresses);
            memcpy((char *)&parameter + all.n_bytes, one.image, (size_t)one.n_bytes);
            all.n_bytes += one.n_bytes;
        }
        all.function = function;
        all.parameter = (char *)&parameter;
        if (launch(all)) {
            return -1;
        }
        PartsToAdd sums;
        for (int k = 0; k < count; k++) {
            sums.of(members[k]->self, members[k]->encoded, members[k]->results.addresses);
        }
        return sums.launch(device, all.stream);
    }
};

bool is_operator(PyObject *object)
{
    return is_cuda_fused(object) && ((CudaFused *)object)->program;
}

class StackCall {
public:
    /* Which results are taken by whom; false with an exception. */
    bool link(PyObject *tuple, PyObject *const *args, Py_ssize_t nargs)
    {
        n = (int)PyTuple_GET_SIZE(tuple);
        if (!read_members(tuple, args, nargs, members, is_operator)) {
            return false;
        }
        int made_by[MAX_STACK * MAX_OUTPUTS], n_made = 0;
        for (int i = 0; i < n; i++) {
            const Program &program = *members[i].self->program;
            for (int j = 0; j < (int)members[i].n; j++) {
                PyObject *given = members[i].args[j];
                bool number = program.inputs[j].kind == INPUT_tensor && PyLong_CheckExact(given);
                long source = number ? PyLong_AsLong(given) : -1;
                if (number && (source < 0 || source >= n_made)) {
                    PyErr_Clear();
                    PyErr_SetString(PyExc_ValueError, "not the number of a result before it");
                    return false;
                }
                members[i].sources[j] = (int16_t)source;
                if (number) {
                    members[i].reads |= 1u << made_by[source];
                    members[made_by[source]].is_read = true;
                }
            }
            for (Py_ssize_t left = count_results(program); left; left--) {
                made_by[n_made++] = i;
            }
        }
        return true;
    }
    PyObject *run()
    {
        for (int i = 0; i < n; i++) {
            if (run_member(i)) {
                return nullptr;
            }
        }
        if (flush()) {
            return nullptr;
        }
        PyObject *all = PyTuple_New(n_made);
        for (int k = 0; all && k < n_made; k++) {
            PyTuple_SET_ITEM(all, k, Py_NewRef(made[k]));
        }
        return all;
    }

private:
    Member members[MAX_STACK];
    Joined launches[MAX_STACK];
    PyObject *made[MAX_STACK * MAX_OUTPUTS]; /* borrowed from the members' results */
    int n = 0, n_made = 0, n_launches = 0, device = -1;
    int captured = -1; /* see ask_for_graph; not asked yet */

    int run_member(int i)
    {
        Member &member = members[i];
        for (Py_ssize_t j = 0; j < member.n; j++) {
            member.own[j] = member.sources[j] < 0 ? member.args[j] : made[member.sources[j]];
        }
        CudaResults &results = member.results;
        if (observer || !encode_member(member)) {
            if (PyErr_Occurred() || flush() || call_alone(member)) {
                return -1;
            }
        } else if (!allocate_results(member.self, member.given, member.encoded, device, results)) {
            return -1;
        } else if (member.encoded.verdict == ENCODED) {
            let_wait(i);
        }
        std::copy(results.made, results.made + results.count, made + n_made);
        n_made += results.count;
        return 0;
    }
    /* Whether it has words, on the others' GPU; an exception may be set where not. */
    bool encode_member(Member &member)
    {
        int on;
        const char *reason = nullptr;
        Taken taken = take_arguments(member.self, member.own, member.n, member.self->device_type,
                                     member.given, on, reason);
        if (PyErr_Occurred() || taken != TAKEN || on < 0 || (device >= 0 && on != device)) {
            return false;
        }
        if (!is_known(on)) {
            return false;
        }
        device = on;
        const Device &machine = gpus[device].machine;
        Encoded &encoded = member.encoded;
        encode_call(member.self, member.given, machine, encoded);
        if ((encoded.verdict != ENCODED && encoded.verdict != NOTHING) || encoded.few_rows) {
            return false;
        }
        if (encoded.verdict == ENCODED && !may_launch(member.self, encoded, device)) {
            return false;
        }
        if ((member.reads || member.is_read) && member.fits_a_block()) {
            captured = captured < 0 ? ask_for_graph(member) : captured;
            if (captured < 0) {
                return false;
            }
            if (!captured && !member.may_chain()) {
                const Device one{1, machine.shared_bytes - IMAGE_BYTES, CHAINED};
                encode_call(member.self, member.given, one, encoded);
                if (!member.may_chain()) {
                    encode_call(member.self, member.given, machine, encoded);
                }
            }
        }
        return true;
    }
    /* Whether launches become part of a graph; −1 with an exception. */
    int ask_for_graph(const Member &member) const
    {
        void *stream;
        return current_stream(member.self->device_type, device, &stream) ? -1 : is_captured(stream);
    }
    /* For the first launch that may have it: behind those that it takes results of. */
    void let_wait(int i)
    {
        Member &member = members[i];
        int least = 0;
        for (int k = 0; k < i; k++) {
            if (member.reads >> k & 1 && members[k].launch >= least) {
                least = members[k].launch + 1;
            }
        }
        int chain = least ? chain_behind(member, least - 1) : -1;
        int which = least - (chain >= 0);
        const Device &machine = gpus[device].machine;
        while (chain < 0 && which < n_launches &&
               !launches[which].has_room(member, false, machine)) {
            which++;
        }
        n_launches = std::max(n_launches, which + 1);
        member.launch = which;
        launches[which].add(member, chain < 0 ? i : chain, chain >= 0);
    }
    /* The chain of a launch in whose block a member may come behind what it reads there; −1 without. */
    int chain_behind(const Member &member, int which) const
    {
        int chain = -1;
        for (int k = 0; k < n; k++) {
            if (member.reads >> k & 1 && members[k].launch == which) {
                if (!members[k].may_chain() || (chain >= 0 && members[k].chain != chain)) {
                    return -1;
                }
                chain = members[k].chain;
            }
        }
        bool room = launches[which].has_room(member, true, gpus[device].machine);
        return room && member.may_chain() && !captured ? chain : -1;
    }
    int flush()
    {
        for (int k = 0; k < n_launches; k++) {
            if (launches[k].run(device)) {
                return -1;
            }
            launches[k] = Joined();
        }
        n_launches = 0;
        return 0;
    }
    /* One without words, or on another GPU, or that somebody wants to see; the launches that it may read
     * results of are under way. */
    int call_alone(Member &member)
    {
        CudaResults &results = member.results;
        Py_ssize_t wanted = count_results(*member.self->program);
        PyObject *found =
            PyObject_Vectorcall((PyObject *)member.self, member.own, (size_t)member.n, nullptr);
        if (!found) {
            return -1;
        }
        if (wanted == 1 && !PyTuple_Check(found)) {
            results.made[results.count++] = found;
            return 0;
        }
        if (!PyTuple_Check(found) || PyTuple_GET_SIZE(found) != wanted) {
            PyErr_SetString(PyExc_TypeError, "a fused operator with another number of results");
            Py_DECREF(found);
            return -1;
        }
        for (Py_ssize_t k = 0; k < wanted; k++) {
            results.made[results.count++] = Py_NewRef(PyTuple_GET_ITEM(found, k));
        }
        Py_DECREF(found);
        return 0;
    }
};

} // namespace

PyObject *cuda_stacked_call(PyObject *tuple, PyObject *const *args, Py_ssize_t nargs)
{
    StackCall call;
    return call.link(tuple, args, nargs) ? call.run() : nullptr;
}

} // namespace magjit_dvm
