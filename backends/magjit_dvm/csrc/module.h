/* What the files of the Python module share. */
#ifndef MAGJIT_DVM_MODULE_H
#define MAGJIT_DVM_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "program.h"

namespace magjit_dvm {

/* Fill a program from lists of tuples, see Program._as_lists; −1 with ValueError if it is malformed. */
int read_program(Program &program, PyObject *inputs, PyObject *nodes, PyObject *outputs);

} // namespace magjit_dvm

#endif
