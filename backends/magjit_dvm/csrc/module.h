/* What the files of the Python module share. */
#ifndef MAGJIT_DVM_MODULE_H
#define MAGJIT_DVM_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>

#include "memo.h"
#include "program.h"

namespace magjit_dvm {

struct Fused {
    PyObject_HEAD
    vectorcallfunc call;
    Program *program;
    Memo *memo;
    PyObject *fallback; /* called with the same arguments where a program cannot be encoded */
    PyObject *source;   /* the program as Python has it, for people */
};

extern Machine machine;
extern PyObject *not_encodable;

/* Nanoseconds that instances took to encode, while somebody wants to know. */
extern bool timing;
extern std::vector<int64_t> *timings;

/* A list that gets (fused operator, arguments) of each call, while somebody wants to know. */
extern PyObject *observer;
int tell_observer(PyObject *object, PyObject *const *args, Py_ssize_t n);

/* The thread's memory for programs of bytecode, for as long as one call needs it. A call within the
 * call (allocating an object may collect garbage, whose finalizers may call anything) has its own. */
class CodeClaim {
public:
    explicit CodeClaim(int n = 1)
        : nested(claimed), code(nested ? new (std::nothrow) Code[(size_t)n]
                                       : (Code *)thread_memory(FOR_code, n * sizeof(Code)))
    {
        claimed = true;
    }
    ~CodeClaim()
    {
        claimed = nested;
        if (nested) {
            delete[] code;
        }
    }
    CodeClaim(const CodeClaim &) = delete;
    Code *get() const { return code; } /* the first of them; NULL: no memory */

private:
    static thread_local bool claimed;
    bool nested;
    Code *code;
};

/* What `torch.set_num_threads` says. */
int threads_now();

/* The bytecode for these arguments, made or found; a message where they have none. */
const char *prepare(Fused *self, PyObject *const *args, Py_ssize_t n, Given *given, Code &code);
/* The same, made. */
const char *prepare_anew(Fused *self, PyObject *const *args, Py_ssize_t n, Given *given,
                         Code &code);

/* New tensors for the results of an encoded program, and their addresses; a part of another result
 * has none of its own. -1: no memory. */
int make_results(const Program &program, const Code &code, char **arguments, PyObject **made);
Py_ssize_t count_results(const Program &program);

/* Addresses of inputs and of parts; those of results are there. */
void place_arguments(const Program &program, const Code &code, const Given *given,
                     char **arguments);

PyObject *fused_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *keywords);
PyObject *fused_panel(PyObject *object, PyObject *const *args, Py_ssize_t nargs);

/* linear(x, weight[, bias]): see few_rows.cpp; linear_by(function) says what is torch's. */
PyObject *linear_call(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *py_linear_by(PyObject *module, PyObject *function);

/* convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups): see
 * small_images.cpp; convolution_by(function) says what is torch's. */
PyObject *convolution_call(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *py_convolution_by(PyObject *module, PyObject *function);

/* stacked(members, *args): several fused operators that do not depend on one another, in one call. */
PyObject *stacked_call(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

/* Adds Views: see views.cpp. */
int add_views(PyObject *module);

/* Fill a program from lists of tuples, see Program._as_lists; −1 with ValueError if it is malformed. */
int read_program(Program &program, PyObject *inputs, PyObject *nodes, PyObject *outputs);

} // namespace magjit_dvm

#endif
