/* The type GuardProgram: see guard.h for what a program is. */
#include "guard.h"

#include <structmember.h>

/* ---- what a program owns ---- */

static void
free_code(guard_program *program)
{
    guard_instr *code = program->code;
    Py_ssize_t n = program->n_instrs;
    program->code = NULL;
    program->n_instrs = 0;
    for (Py_ssize_t i = 0; code != NULL && i < n; i++) {
        guard_instr *in = &code[i];
        switch (in->op) {
        case G_DISTINCT:
        case G_DIFFER:
        case G_NO_OVERLAP:
        case G_SIZES:
        case G_PREDICATE:
            PyMem_Free(in->u.slots);
            break;
        case G_TP_NAMES:
            mj_type_names_free(in->u.names);
            break;
        case G_TENSOR:
            mj_meta_free(in->u.meta);
            break;
        case G_GLOBAL_STATE:
            mj_state_free(in->u.state);
            break;
        case G_PYEQ:
            Py_XDECREF(in->u.obj2);
            break;
        default:
            break;
        }
        Py_XDECREF(in->obj);
    }
    PyMem_Free(code);
}

static int
traverse_code(guard_program *program, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; program->code != NULL && i < program->n_instrs; i++) {
        guard_instr *in = &program->code[i];
        Py_VISIT(in->obj);
        int status = 0;
        switch (in->op) {
        case G_TP_NAMES:
            status = mj_type_names_traverse(in->u.names, visit, arg);
            break;
        case G_TENSOR:
            status = mj_meta_traverse(in->u.meta, visit, arg);
            break;
        case G_GLOBAL_STATE:
            status = mj_state_traverse(in->u.state, visit, arg);
            break;
        case G_PYEQ:
            Py_VISIT(in->u.obj2);
            break;
        default:
            break;
        }
        if (status != 0) {
            return status;
        }
    }
    return 0;
}

/* ---- one evaluation ---- */

static bool
make_private_slots(guard_run *run)
{
    guard_program *p = run->program;
    run->slots = PyMem_Calloc((size_t)(p->n_slots + p->n_temps + 1), sizeof(PyObject *));
    run->temps = run->slots + p->n_slots;
    run->private_slots = true;
    run->cache = false;
    return run->slots != NULL;
}

/* The fast path is built at the second accepted call: many programs are never called again. */
static void
enter_own_slots(guard_program *program, guard_run *run)
{
    if (program->fast != NULL && mj_fast_check(program, run) != V_UNKNOWN) {
        return;
    }
    run->slots = program->slots;
    run->cache = true;
    run->failed = mj_guard_execute(run, 0, program->n_instrs);
    if (run->failed < 0 && ++program->accepted >= 2) {
        program->accepted = 2;
        mj_fast_build(program, run);
    }
}

/* The program's own slots unless they are in use, which needs a C function called by the program to
 * have come back here; such a call works on slots of its own and skips nothing. */
bool
mj_program_enter(guard_program *program, const guard_call *call, guard_run *run)
{
    run->program = program;
    run->call = call;
    run->n_temps = 0;
    run->pinned = false;
    run->failed = -1;
    if (program->busy) {
        if (!make_private_slots(run)) {
            return false;
        }
        run->failed = mj_guard_execute(run, 0, program->n_instrs);
    }
    else {
        program->busy = true;
        run->private_slots = false;
        run->temps = program->temps;
        enter_own_slots(program, run);
    }
    if (run->failed >= 0) {
        mj_program_leave(run);
        return false;
    }
    return true;
}

void
mj_program_leave(guard_run *run)
{
    /* Still busy: dropping a reference may run a finaliser, and that may call this program. */
    while (run->n_temps > 0) {
        Py_DECREF(run->temps[--run->n_temps]);
    }
    if (run->private_slots) {
        PyMem_Free(run->slots);
    }
    else {
        run->program->busy = false;
    }
}

/* ---- calls from Python ---- */

typedef struct {
    guard_call call;
    PyObject **values;
    PyObject *kwnames;
} python_call;

static int
unpack_call(PyObject *const *args, Py_ssize_t nargs, python_call *c)
{
    memset(c, 0, sizeof(*c));
    if (nargs < 1 || nargs > 2 || !PyTuple_Check(args[0]) ||
        (nargs == 2 && args[1] != Py_None && !PyDict_Check(args[1]))) {
        PyErr_SetString(PyExc_TypeError, "expected (args: tuple, kwargs: dict | None = None)");
        return -1;
    }
    PyObject *kwargs = nargs == 2 && args[1] != Py_None ? args[1] : NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(args[0]), k = kwargs != NULL ? PyDict_GET_SIZE(kwargs) : 0;
    c->values = PyMem_Malloc((size_t)(n + k + 1) * sizeof(PyObject *));
    c->kwnames = k > 0 ? PyTuple_New(k) : NULL;
    if (c->values == NULL || (k > 0 && c->kwnames == NULL)) {
        PyMem_Free(c->values);
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        c->values[i] = PyTuple_GET_ITEM(args[0], i);
    }
    Py_ssize_t pos = 0, i = 0;
    PyObject *key, *value;
    while (k > 0 && PyDict_Next(kwargs, &pos, &key, &value)) {
        PyTuple_SET_ITEM(c->kwnames, i, Py_NewRef(key));
        c->values[n + i++] = value;
    }
    c->call = (guard_call){.args = c->values, .nargs = n, .kwnames = c->kwnames};
    return 0;
}

static void
free_call(python_call *c)
{
    PyMem_Free(c->values);
    Py_XDECREF(c->kwnames);
}

static PyObject *
program_check(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    python_call c;
    guard_run run;
    if (unpack_call(args, nargs, &c) < 0) {
        return NULL;
    }
    bool ok = mj_program_enter((guard_program *)self, &c.call, &run);
    if (ok) {
        mj_program_leave(&run);
    }
    free_call(&c);
    return PyBool_FromLong(ok);
}

/* On slots of its own and without skipping a block, so that the answer never rests on a version. */
static PyObject *
evaluate(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *(*result)(guard_run *))
{
    python_call c;
    guard_run run = {.program = (guard_program *)self, .failed = -1};
    if (unpack_call(args, nargs, &c) < 0) {
        return NULL;
    }
    run.call = &c.call;
    PyObject *value = NULL;
    if (make_private_slots(&run)) {
        run.failed = mj_guard_execute(&run, 0, run.program->n_instrs);
        value = result(&run);
        mj_program_leave(&run);
    }
    else {
        PyErr_NoMemory();
    }
    free_call(&c);
    return value;
}

static PyObject *
failing_index(guard_run *run)
{
    return run->failed >= 0 ? PyLong_FromSsize_t(run->failed) : Py_NewRef(Py_None);
}

static PyObject *
all_values(guard_run *run)
{
    PyObject *list = PyList_New(run->program->n_slots);
    for (Py_ssize_t i = 0; list != NULL && i < run->program->n_slots; i++) {
        PyList_SET_ITEM(list, i, Py_NewRef(run->slots[i] != NULL ? run->slots[i] : mj_null));
    }
    return list;
}

static PyObject *
slot_values(guard_run *run)
{
    return run->failed >= 0 ? Py_NewRef(Py_None) : all_values(run);
}

static PyObject *
failing_values(guard_run *run)
{
    if (run->failed < 0) {
        Py_RETURN_NONE;
    }
    PyObject *values = all_values(run);
    return values == NULL ? NULL : Py_BuildValue("(nN)", run->failed, values);
}

static PyObject *
program_failure(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return evaluate(self, args, nargs, failing_values);
}

static PyObject *
program_explain(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return evaluate(self, args, nargs, failing_index);
}

static PyObject *
program_slots(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return evaluate(self, args, nargs, slot_values);
}

/* ---- the type ---- */

static PyObject *
program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"instrs", "n_slots", NULL};
    PyObject *instrs;
    Py_ssize_t n_slots;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On:GuardProgram", keywords, &instrs,
                                     &n_slots)) {
        return NULL;
    }
    if (n_slots < 0 || n_slots > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "n_slots out of range");
        return NULL;
    }
    PyObject *tuple = PySequence_Tuple(instrs);
    if (tuple == NULL) {
        return NULL;
    }
    guard_program *p = (guard_program *)type->tp_alloc(type, 0);
    if (p == NULL) {
        Py_DECREF(tuple);
        return NULL;
    }
    p->n_slots = n_slots;
    int status = mj_guard_parse(p, tuple);
    Py_DECREF(tuple);
    if (status == 0) {
        p->slots = PyMem_Calloc((size_t)n_slots + 1, sizeof(PyObject *));
        p->temps = PyMem_Calloc((size_t)p->n_temps + 1, sizeof(PyObject *));
        if (p->slots == NULL || p->temps == NULL) {
            PyErr_NoMemory();
            status = -1;
        }
    }
    if (status < 0) {
        Py_DECREF(p);
        return NULL;
    }
    return (PyObject *)p;
}

static int
program_traverse(PyObject *self, visitproc visit, void *arg)
{
    return traverse_code((guard_program *)self, visit, arg);
}

static void
program_free(guard_program *p)
{
    free_code(p);
    mj_fast_free(p->fast);
    p->fast = NULL;
    PyMem_Free(p->slots);
    PyMem_Free(p->temps);
    PyMem_Free(p->written);
    p->written = NULL;
    p->slots = p->temps = NULL;
}

/* Without instructions every check would hold, so a cleared program must not be reachable: only
 * records hold one, and those clear themselves first. */
static void
program_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    program_free((guard_program *)self);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
program_repr(PyObject *self)
{
    guard_program *p = (guard_program *)self;
    return PyUnicode_FromFormat("<GuardProgram of %zd instructions, %zd slots>", p->n_instrs,
                                p->n_slots);
}

static PyObject *
program_get_fast(PyObject *self, void *closure)
{
    guard_program *p = (guard_program *)self;
    return p->fast != NULL ? mj_fast_describe(p->fast) : Py_NewRef(Py_None);
}

static PyGetSetDef program_getset[] = {
    {"fast", program_get_fast, NULL,
     "the fast path, or None while there is none: numbers of roots, words and tensors, and the "
     "indices of the instructions that are evaluated as usual",
     NULL},
    {NULL},
};

static PyMethodDef program_methods[] = {
    {"check", (PyCFunction)(void (*)(void))program_check, METH_FASTCALL,
     "check(args, kwargs=None): whether the call satisfies every guard"},
    {"explain", (PyCFunction)(void (*)(void))program_explain, METH_FASTCALL,
     "explain(args, kwargs=None): None, or the index of the first instruction that fails"},
    {"failure", (PyCFunction)(void (*)(void))program_failure, METH_FASTCALL,
     "failure(args, kwargs=None): None, or that index with a list of the slots' values there"},
    {"slots", (PyCFunction)(void (*)(void))program_slots, METH_FASTCALL,
     "slots(args, kwargs=None): what each slot holds (_C.NULL: nothing), or None if a guard fails"},
    {NULL},
};

static PyMemberDef program_members[] = {
    {"n_slots", T_PYSSIZET, offsetof(guard_program, n_slots), READONLY, "number of slots"},
    {"n_instrs", T_PYSSIZET, offsetof(guard_program, n_instrs), READONLY, "number of instructions"},
    {NULL},
};

PyTypeObject mj_program_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "magjit._C.GuardProgram",
    .tp_basicsize = sizeof(guard_program),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "GuardProgram(instrs, n_slots): a list of guard instructions, verified and ready to "
              "check calls",
    .tp_new = program_new,
    .tp_dealloc = program_dealloc,
    .tp_traverse = program_traverse,
    .tp_repr = program_repr,
    .tp_methods = program_methods,
    .tp_members = program_members,
    .tp_getset = program_getset,
};

int
mj_init_guard(PyObject *module)
{
    if (mj_value_init() < 0 || mj_guard_fetch_init() < 0 || mj_init_tensor_meta(module) < 0 ||
        mj_init_global_state(module) < 0) {
        return -1;
    }
    return PyModule_AddType(module, &mj_program_type);
}
