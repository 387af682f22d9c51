/* Records, and what the dispatcher needs of them. */
#ifndef MAGJIT_DISPATCH_H
#define MAGJIT_DISPATCH_H

#include "guard.h"

typedef struct {
    PyObject_HEAD guard_program *program;
    PyObject *graph_fn;
    PyObject *finish;       /* callable, or NULL */
    Py_ssize_t finish_item; /* item of the outputs to return, or -1 */
    Py_ssize_t n_inputs, n_finish;
    int32_t *slots; /* n_inputs of the graph, then n_finish */
    unsigned long long hits;
    char pure; /* changes no data of what is outside, nor runs Python code that might */
} record;

extern PyTypeObject mj_record_type;

/* The result of a call that the record's program has accepted; leaves the program.  When it fails,
 * `in_graph` tells whether the graph did, so that nothing has been done with its outputs. */
PyObject *mj_record_serve(record *r, guard_run *run, bool *in_graph);

#endif /* MAGJIT_DISPATCH_H */
