/* Cores are threads: who runs which tiles, and with what memory. */
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "core.h"

namespace magjit_dvm {

const Kernels &kernels()
{
    static const Kernels &chosen = [&]() -> const Kernels & {
        const char *wanted = std::getenv("MAGJIT_DVM_LEVEL"); /* for tests of the lower ones */
        int most = wanted ? std::atoi(wanted) : 4;
        if (most >= 4 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512cd")) {
            return kernels_v4();
        }
        if (most >= 3 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
            __builtin_cpu_supports("bmi2")) {
            return kernels_v3();
        }
        return kernels_base();
    }();
    return chosen;
}

namespace {

enum : int { MAX_TEAM = 256 };

/* Local memory of the calling thread, kept for its next program. */
struct Local {
    char *memory = nullptr;
    size_t size = 0;
    char *at_least(size_t want)
    {
        if (want > size) {
            std::free(memory);
            size = (want + 4095) / 4096 * 4096;
            memory = (char *)std::aligned_alloc(4096, size);
            if (!memory) {
                size = 0;
            }
        }
        return memory;
    }
    ~Local() { std::free(memory); }
};
thread_local Local local_memory;

struct Arena {
    char *memory = nullptr;
    ~Arena() { std::free(memory); }
};
thread_local Arena arena;

/* torch's own OpenMP runtime, by name: another one would mean another pool of threads. */
struct Runtime {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = nullptr;
    int (*thread_number)() = nullptr;
    int (*thread_count)() = nullptr;
    int (*in_parallel)() = nullptr;
    void (*barrier)() = nullptr;
    pid_t process = 0;
    Runtime()
    {
        void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
        auto find = [&](const char *name) {
            void *found = library ? dlsym(library, name) : nullptr;
            return found ? found : dlsym(RTLD_DEFAULT, name);
        };
        parallel = (decltype(parallel))find("GOMP_parallel");
        thread_number = (decltype(thread_number))find("omp_get_thread_num");
        thread_count = (decltype(thread_count))find("omp_get_num_threads");
        in_parallel = (decltype(in_parallel))find("omp_in_parallel");
        barrier = (decltype(barrier))find("GOMP_barrier");
        process = getpid();
    }
    bool usable() const
    {
        /* The pool's threads do not live on in a forked child. */
        return parallel && thread_number && thread_count && in_parallel && process == getpid() &&
               !in_parallel();
    }
};

const Runtime &runtime()
{
    static const Runtime found;
    return found;
}

struct Job {
    const Code &code;
    char *const *arguments;
    int status;    /* bits: see execute */
    bool together; /* all cores share each tile */
    char **locals; /* local memory of each of them */
};

/* Few tiles of long reductions: every core walks its part of each of them. */
void run_together(Job &job, int core, int cores)
{
    char *memory = local_memory.at_least(job.code.header.local_bytes + 64);
    job.locals[core] = memory;
    runtime().barrier();
    if (std::find(job.locals, job.locals + cores, nullptr) != job.locals + cores) {
        __atomic_fetch_or(&job.status, NO_MEMORY, __ATOMIC_RELAXED);
        return;
    }
    Core machine(job.code, job.arguments, memory);
    machine.part = core;
    machine.parts = cores;
    machine.locals = job.locals;
    machine.barrier = runtime().barrier;
    machine.run(0, job.code.header.tiles);
    if (machine.status) {
        __atomic_fetch_or(&job.status, machine.status, __ATOMIC_RELAXED);
    }
}

void run_share(Job &job, int64_t core, int64_t cores)
{
    const Header &h = job.code.header;
    int64_t share = (h.tiles + cores - 1) / cores;
    int64_t first = std::min(h.tiles, share * core), last = std::min(h.tiles, first + share);
    if (first >= last) {
        return;
    }
    char *memory = local_memory.at_least(h.local_bytes + 64);
    if (!memory) {
        __atomic_fetch_or(&job.status, NO_MEMORY, __ATOMIC_RELAXED);
        return;
    }
    Core machine(job.code, job.arguments, memory);
    machine.run(first, last);
    if (machine.status) {
        __atomic_fetch_or(&job.status, machine.status, __ATOMIC_RELAXED);
    }
}

void run_on_core(void *data)
{
    Job &job = *(Job *)data;
    int core = runtime().thread_number(), cores = runtime().thread_count();
    if (job.together && cores > 1) {
        run_together(job, core, cores);
    } else {
        run_share(job, core, cores);
    }
}

/* Programs whose tiles one region of threads shares. */
struct Stack {
    const Ready *programs;
    int n;
    int64_t work[MAX_STACK + 1]; /* of those before each, and of all */
    int status;
};

/* The first tile of a program for the core whose share of all work begins at so much. */
int64_t tile_at(const Stack &stack, int program, int64_t work)
{
    int64_t before = stack.work[program], own = stack.work[program + 1] - before;
    int64_t tiles = stack.programs[program].code->header.tiles;
    double share = (double)(std::clamp<int64_t>(work - before, 0, own)) / (double)own;
    return (int64_t)(share * (double)tiles + 0.5);
}

void run_stack(Stack &stack, int64_t core, int64_t cores)
{
    int64_t all = stack.work[stack.n];
    int64_t begin = all * core / cores, end = all * (core + 1) / cores;
    for (int i = 0; i < stack.n; i++) {
        const Ready &one = stack.programs[i];
        int64_t first = tile_at(stack, i, begin), last = tile_at(stack, i, end);
        if (first >= last) {
            continue;
        }
        char *memory = local_memory.at_least(one.code->header.local_bytes + 64);
        if (!memory) {
            __atomic_fetch_or(&stack.status, NO_MEMORY, __ATOMIC_RELAXED);
            return;
        }
        Core machine(*one.code, one.arguments, memory);
        machine.run(first, last);
        if (machine.status) {
            __atomic_fetch_or(&stack.status, machine.status, __ATOMIC_RELAXED);
        }
    }
}

/* Anything else that cores share. */
struct Shared {
    void (*body)(void *, int64_t, int64_t);
    void *data;
};

void run_shared_on_core(void *data)
{
    Shared &shared = *(Shared *)data;
    shared.body(shared.data, runtime().thread_number(), runtime().thread_count());
}

void run_stack_on_core(void *data)
{
    run_stack(*(Stack *)data, runtime().thread_number(), runtime().thread_count());
}

/* Running results: what comes later needs what was before it, so cores cannot share a tile. */
bool scans(const Code &code)
{
    for (uint32_t at = 0; at < code.header.code_words; at += INSN_WORDS) {
        Insn insn;
        memcpy(&insn, &code.words[at], sizeof(insn));
        if (OPS[insn.op].kind == KIND_scan) {
            return true;
        }
    }
    return false;
}

/* Whether its few tiles are long reductions, which all cores share. */
bool together(const Code &code)
{
    return code.header.reduces && 2 * code.header.tiles <= code.cores && code.cores <= MAX_TEAM &&
           runtime().barrier && !scans(code);
}

} // namespace

void find_runtime() { (void)runtime(); }

void on_cores(int cores, void (*body)(void *, int64_t core, int64_t cores), void *data)
{
    if (cores > 1 && runtime().usable()) {
        Shared shared{body, data};
        runtime().parallel(run_shared_on_core, &shared, (unsigned)cores, 0);
    } else {
        body(data, 0, 1);
    }
}

void *thread_memory(Purpose purpose, size_t bytes)
{
    constexpr size_t HUGE_PAGE = (size_t)2 << 20, SHARE = HUGE_PAGE / 2;
    static_assert(MAX_STACK * sizeof(Code) <= SHARE, "the bytecode of a stack");
    if (!arena.memory) {
        arena.memory = (char *)std::aligned_alloc(HUGE_PAGE, HUGE_PAGE);
        if (!arena.memory) {
            return nullptr;
        }
        (void)madvise(arena.memory, HUGE_PAGE, MADV_HUGEPAGE);
    }
    return bytes <= SHARE ? arena.memory + (purpose == FOR_code ? 0 : SHARE) : nullptr;
}

int execute(const Code &code, char *const *arguments)
{
    char *locals[MAX_TEAM]; /* not cleared: most programs have no use for it */
    Job job{code, arguments, 0, false, locals};
    int64_t cores = std::min<int64_t>(code.cores, code.header.tiles);
    if (together(code)) {
        job.together = true;
        cores = code.cores;
    }
    if (cores > 1 && runtime().usable()) {
        runtime().parallel(run_on_core, &job, (unsigned)cores, 0);
    } else {
        run_share(job, 0, 1);
    }
    return job.status;
}

int execute_stacked(const Ready *stack, int n, int cores)
{
    Ready shared[MAX_STACK];
    Stack all{shared, 0, {0}, 0};
    for (int i = 0; i < n; i++) {
        const Header &h = stack[i].code->header;
        if (together(*stack[i].code)) {
            all.status |= execute(*stack[i].code, stack[i].arguments);
            continue;
        }
        shared[all.n++] = stack[i];
        all.work[all.n] = all.work[all.n - 1] + h.elements * h.n_phases;
    }
    if (cores > 1 && all.n && runtime().usable()) {
        runtime().parallel(run_stack_on_core, &all, (unsigned)cores, 0);
    } else {
        run_stack(all, 0, 1);
    }
    return all.status;
}

} // namespace magjit_dvm
