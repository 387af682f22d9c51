/* Guard programs: the executor, which evaluates any program on any call. */
#define Py_BUILD_CORE 1 /* dict versions: deprecated for others, but kept by 3.12 and 3.13 */
#include "guard_ops.h"
#undef Py_BUILD_CORE

/* The order of an OrderedDict's keys is not part of the version of the dict below it. */
uint64_t
mj_block_version(const guard_instr *block, PyObject *dict)
{
    return (block->flags & GF_ORDERED) && PyODict_Check(dict) ? 0 : mj_dict_version(dict);
}

/* Checks the block's dict in full, and stores its version. */
static Py_ssize_t
execute_block(guard_run *run, Py_ssize_t pc, PyObject *dict)
{
    guard_instr *in = &run->program->code[pc];
    if (run->cache) {
        in->u.version = 0; /* the slots of the block are about to change */
    }
    Py_ssize_t failed = mj_guard_execute(run, pc + 1, pc + 1 + in->n);
    if (failed < 0 && run->cache) {
        in->u.version = mj_block_version(in, dict);
    }
    return failed;
}

bool
mj_guard_check_one(guard_run *run, guard_instr *in)
{
    PyObject *src = in->src >= 0 ? run->slots[in->src] : NULL;
    switch (in->op) {
    case G_TYPE_IS:
        return (PyObject *)Py_TYPE(src) == in->obj;
    case G_IS:
        return src == in->obj;
    case G_DICT:
        return mj_put(run, in, mj_instance_dict(src));
    case G_TENSOR:
        return mj_meta_check(in->u.meta, src);
    default: {
        op_function fetch = mj_fetch_functions[in->op];
        return (fetch != NULL ? fetch : mj_check_functions[in->op])(run, in);
    }
    }
}

Py_ssize_t
mj_guard_execute(guard_run *run, Py_ssize_t from, Py_ssize_t to)
{
    guard_instr *code = run->program->code;
    for (Py_ssize_t pc = from; pc < to; pc++) {
        guard_instr *in = &code[pc];
        if (in->op != G_DICT_BLOCK) {
            if (!mj_guard_check_one(run, in)) {
                return pc;
            }
            continue;
        }
        PyObject *dict = run->slots[in->src];
        if (!PyDict_Check(dict)) {
            return pc;
        }
        if (in->u.version == 0 || !run->cache || mj_dict_version(dict) != in->u.version) {
            Py_ssize_t failed = execute_block(run, pc, dict);
            if (failed >= 0) {
                return failed;
            }
        }
        pc += in->n;
    }
    return -1;
}
