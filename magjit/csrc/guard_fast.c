/* The fast path of a guard program: checking.  guard_fast.h says what it is. */
#define Py_BUILD_CORE 1 /* dict versions: deprecated for others, but kept by 3.12 and 3.13 */
#include "guard_fast.h"
#undef Py_BUILD_CORE

const raw64 mj_never = 0;

/* The block's dict has another version.  As long as it holds the same objects at the slots' keys,
 * and its other guards hold, all else stands. */
static bool
revalidate(guard_program *p, guard_run *run, Py_ssize_t at)
{
    fast_path *f = p->fast;
    Py_ssize_t pc = f->origins.item[at];
    guard_instr *block = &p->code[pc];
    if (block->op != G_DICT_BLOCK) {
        f->suspect = (int32_t)pc;
        return false;
    }
    PyObject *dict = run->slots[block->src];
    word *w = &f->words.item[at];
    if (w->address != &mj_never && block->flags & GF_ORDERED &&
        PyODict_Check(dict) != !!(block->flags & GF_ODICT)) {
        return false;
    }
    for (Py_ssize_t i = pc + 1; i <= pc + block->n; i++) {
        guard_instr *in = &p->code[i];
        if (in->flags & GF_IN_REST) {
            continue;
        }
        PyObject *before = in->dst >= 0 ? run->slots[in->dst] : NULL;
        if (!mj_guard_check_one(run, in)) {
            return false;
        }
        if (in->dst >= 0 && run->slots[in->dst] != before) {
            run->slots[in->dst] = before;
            f->suspect = (int32_t)i;
            return false;
        }
        if (in->flags & GF_DICT && !PyDict_Check(before)) {
            return false;
        }
    }
    if (w->address != &mj_never) {
        w->expected = *w->address;
        return mj_dict_version(dict) != 0;
    }
    return true;
}

static verdict
check_rest(guard_program *p, guard_run *run)
{
    fast_path *f = p->fast;
    for (Py_ssize_t i = 0; i < f->rest.n; i++) {
        rest_instr *r = &f->rest.item[i];
        guard_instr *in = &p->code[r->instr];
        run->failed = r->instr;
        if (in->op != G_DICT_BLOCK) {
            if (!mj_guard_check_one(run, in)) {
                return V_NO;
            }
            continue;
        }
        PyObject *dict = run->slots[in->src];
        if (!PyDict_Check(dict)) {
            return V_NO;
        }
        if (r->version == 0 || mj_dict_version(dict) != r->version) {
            r->version = 0;
            run->failed = mj_guard_execute(run, r->instr + 1, r->instr + 1 + in->n);
            if (run->failed >= 0) {
                return V_NO;
            }
            r->version = mj_block_version(in, dict);
        }
    }
    run->failed = -1;
    return V_YES;
}

static verdict
check_roots(guard_program *p, guard_run *run)
{
    fast_path *f = p->fast;
    for (Py_ssize_t i = 0; i < f->shape.n; i++) {
        if (!mj_guard_check_one(run, &p->code[f->shape.item[i]])) {
            run->failed = f->shape.item[i];
            return V_NO;
        }
    }
    for (Py_ssize_t i = 0; i < f->roots.n; i++) {
        root_check *r = &f->roots.item[i];
        if (r->argument >= run->call->nargs) {
            run->failed = r->instr;
            return V_NO;
        }
        if (run->call->args[r->argument] != r->object) {
            f->suspect = r->instr;
            return V_UNKNOWN;
        }
    }
    return V_YES;
}

/* V_YES and V_NO are what the executor would say; V_UNKNOWN: ask it. */
verdict
mj_fast_check(guard_program *p, guard_run *run)
{
    fast_path *f = p->fast;
    run->slots = f->slots;
    run->cache = false;
    f->suspect = -1;
    verdict v = check_roots(p, run);
    if (v != V_YES) {
        return v;
    }
    const word *w = f->words.item, *end = w + f->words.n;
    for (; w < end; w++) {
        if (*w->address != w->expected && !revalidate(p, run, w - f->words.item)) {
            return V_UNKNOWN;
        }
    }
    for (Py_ssize_t i = 0; i < f->tensors.n; i++) {
        tensor_check *t = &f->tensors.item[i];
        if (!mj_meta_check(t->meta, t->tensor)) {
            run->failed = t->instr;
            return V_NO;
        }
    }
    return check_rest(p, run);
}

void
mj_fast_free(fast_path *f)
{
    if (f == NULL) {
        return;
    }
    PyMem_Free(f->shape.item);
    PyMem_Free(f->roots.item);
    PyMem_Free(f->words.item);
    PyMem_Free(f->origins.item);
    PyMem_Free(f->tensors.item);
    PyMem_Free(f->rest.item);
    PyMem_Free(f->slots);
    PyMem_Free(f);
}

PyObject *
mj_fast_describe(const fast_path *f)
{
    PyObject *rest = PyTuple_New(f->rest.n);
    for (Py_ssize_t i = 0; rest != NULL && i < f->rest.n; i++) {
        PyObject *index = PyLong_FromLong(f->rest.item[i].instr);
        if (index == NULL) {
            Py_CLEAR(rest);
            break;
        }
        PyTuple_SET_ITEM(rest, i, index);
    }
    return Py_BuildValue("(nnnN)", f->roots.n, f->words.n, f->tensors.n, rest);
}
