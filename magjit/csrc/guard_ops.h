/* Guard programs: one small function for each operation. */
#ifndef MAGJIT_GUARD_OPS_H
#define MAGJIT_GUARD_OPS_H

#include "guard.h"

typedef bool (*op_function)(guard_run *run, guard_instr *in);

/* By operation; NULL where the other table, or the executor, has it. */
extern const op_function mj_fetch_functions[G_COUNT];
extern const op_function mj_check_functions[G_COUNT];

extern PyTypeObject *mj_deque_type;
PyObject *mj_instance_dict(PyObject *obj); /* borrowed, or NULL */

static inline bool
mj_put(guard_run *run, const guard_instr *in, PyObject *value)
{
    run->slots[in->dst] = value;
    return value != NULL;
}

#endif /* MAGJIT_GUARD_OPS_H */
