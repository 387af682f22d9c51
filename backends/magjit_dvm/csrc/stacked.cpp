/* Calls of several fused operators at once (DVM, §5: stacking). */
#include "module.h"

#include <algorithm>

#include "cuda_calls.h"
#include "stack_members.h"

namespace magjit_dvm {

namespace {

struct Member {
    Fused *self;
    PyObject *const *args;
    Py_ssize_t n;
    Given given[MAX_INPUTS];
    char *arguments[MAX_INPUTS + MAX_OUTPUTS];
    PyObject *made[MAX_OUTPUTS];

    const Program &program() const { return *self->program; }
};

void drop(Member *members, int n)
{
    for (int i = 0; i < n; i++) {
        for (size_t o = 0; o < members[i].program().outputs.size(); o++) {
            Py_CLEAR(members[i].made[o]);
        }
    }
}

bool is_operator(PyObject *object) { return PyVectorcall_Function(object) == fused_call; }

/* One after another, each as if it had been called by itself: the results of all. */
PyObject *call_apart(const Member *members, Py_ssize_t n)
{
    PyObject *all = PyList_New(0);
    for (Py_ssize_t i = 0; all && i < n; i++) {
        const Member &member = members[i];
        PyObject *one =
            PyObject_Vectorcall((PyObject *)member.self, member.args, (size_t)member.n, nullptr);
        int failed = one ? 0 : -1;
        if (one && PyTuple_Check(one)) { /* of several, or of none */
            failed = PyList_SetSlice(all, PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, one);
        } else if (one) {
            failed = PyList_Append(all, one);
        }
        Py_XDECREF(one);
        if (failed) {
            Py_CLEAR(all);
        }
    }
    PyObject *tuple = all ? PyList_AsTuple(all) : nullptr;
    Py_XDECREF(all);
    return tuple;
}

int run_members(Member *members, const Code *codes, int n)
{
    Ready ready[MAX_STACK];
    int n_ready = 0, threads = 1;
    int64_t elements = 0;
    for (int i = 0; i < n; i++) {
        if (!codes[i].empty) {
            ready[n_ready++] = {&codes[i], members[i].arguments};
            elements += codes[i].header.elements;
        }
    }
    if (elements >= machine.grain) {
        threads = threads_now();
    }
    PyThreadState *state = elements > 16384 ? PyEval_SaveThread() : nullptr;
    int status = execute_stacked(ready, n_ready, threads);
    if (state) {
        PyEval_RestoreThread(state);
    }
    return status;
}

} // namespace

PyObject *stacked_call(PyObject *, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 1 || !PyTuple_Check(args[0]) || PyTuple_GET_SIZE(args[0]) > MAX_STACK) {
        PyErr_SetString(PyExc_TypeError, "stacked(up to 8 fused operators, *args)");
        return nullptr;
    }
    if (PyTuple_GET_SIZE(args[0]) && is_cuda_fused(PyTuple_GET_ITEM(args[0], 0))) {
        return cuda_stacked_call(args[0], args + 1, nargs - 1);
    }
    Member members[MAX_STACK];
    int n = (int)PyTuple_GET_SIZE(args[0]);
    if (!read_members(args[0], args + 1, nargs - 1, members, is_operator)) {
        return nullptr;
    }
    if (observer) {
        return call_apart(members, n);
    }
    CodeClaim claim(MAX_STACK);
    Code *codes = claim.get();
    if (!codes) {
        return PyErr_NoMemory();
    }
    for (int i = 0; i < n; i++) {
        Member &member = members[i];
        if (prepare(member.self, member.args, member.n, member.given, codes[i])) {
            return PyErr_Occurred() ? nullptr : call_apart(members, n);
        }
    }
    for (int i = 0; i < n; i++) {
        Member &member = members[i];
        if (make_results(member.program(), codes[i], member.arguments, member.made)) {
            drop(members, i);
            return nullptr;
        }
        place_arguments(member.program(), codes[i], member.given, member.arguments);
    }
    int status = run_members(members, codes, n);
    if (status) {
        drop(members, n);
        return status & NO_MEMORY ? PyErr_NoMemory() : call_apart(members, n); /* it raises in its words */
    }
    Py_ssize_t count = 0, at = 0;
    for (int i = 0; i < n; i++) {
        count += count_results(members[i].program());
    }
    PyObject *results = PyTuple_New(count);
    for (int i = 0; results && i < n; i++) {
        for (size_t o = 0; o < members[i].program().outputs.size(); o++) {
            if (members[i].made[o]) {
                PyTuple_SET_ITEM(results, at++, Py_NewRef(members[i].made[o]));
            }
        }
    }
    drop(members, n);
    return results;
}

} // namespace magjit_dvm
