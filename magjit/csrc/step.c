/* Step: what a replay does between two regions of a program (magjit.regions).
 *
 *     drive(step, values) = until a region ends with something else than Pending(step, values):
 *                           do the operation; call the region behind it
 *     way                ::= (offset, count) -> target picked*
 *
 * The values are those that the frames hold, then the operands.  The tests, loops and reads of
 * tensors that most programs are cut at are done here; anything else is point.perform's.  The way
 * says for where an operation goes on, having left `count` values, what is called with which of the
 * values that the frames hold and with those that are left: the dispatcher of a region.  Without a
 * target, the program is over, and the last of them is its result.
 */
#include "reading.h"

#include <structmember.h>

/* As magjit.continuations numbers them. */
typedef enum { STEP_PYTHON, STEP_TEST, STEP_NEXT, STEP_READ } step_kind;

/* Values that are left on C's stack; an operation that leaves more is Python's. */
enum { MOST_LEFT = 8, MOST_ON_STACK = 64 };

typedef struct {
    Py_ssize_t offset, count;
    PyObject *target; /* NULL: the program is over */
    Py_ssize_t n_picked;
    int32_t *index; /* of the values that are picked */
} way;

typedef struct {
    PyObject_HEAD vectorcallfunc vectorcall;
    PyObject *point, *find_way, *weakrefs;
    step_kind kind;
    bool jumps_if; /* of a test */
    Py_ssize_t n_held, following, target;
    Py_ssize_t unpacks, unpacked; /* items of what an iterator gives, and where it goes on; or -1 */
    Py_ssize_t n_ways;
    way *ways;
    unsigned long long done;
} step;

typedef struct {
    PyObject_HEAD step *step;
    PyObject *values;
} pending;

typedef struct {
    Py_ssize_t offset, n;
    PyObject *value[MOST_LEFT]; /* owned */
    PyObject *many;             /* a tuple that has them instead, or NULL */
} outcome;

static PyTypeObject step_type, pending_type;

/* ---- ways ---- */

static void
forget_ways(step *s)
{
    Py_ssize_t n = s->n_ways;
    way *ways = s->ways;
    s->n_ways = 0;
    s->ways = NULL;
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_XDECREF(ways[i].target);
        PyMem_Free(ways[i].index);
    }
    PyMem_Free(ways);
}

static bool
read_indices(way *w, PyObject *picked, Py_ssize_t n_held)
{
    for (Py_ssize_t i = 0; i < w->n_picked; i++) {
        Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GET_ITEM(picked, i));
        if (index == -1 && PyErr_Occurred()) {
            return false;
        }
        if (index < 0 || index >= n_held) {
            PyErr_SetString(PyExc_IndexError, "the frames hold no such value");
            return false;
        }
        w->index[i] = (int32_t)index;
    }
    return true;
}

/* find_way(point, offset, count) = (target or None, picked) */
static way *
new_way(step *s, Py_ssize_t offset, Py_ssize_t count)
{
    PyObject *found = PyObject_CallFunction(s->find_way, "Onn", s->point, offset, count);
    PyObject *target, *picked;
    if (found == NULL) {
        return NULL;
    }
    way w = {.offset = offset, .count = count}, *ways = NULL;
    bool ok = PyArg_ParseTuple(found, "OO!", &target, &PyTuple_Type, &picked);
    if (ok) {
        w.target = target == Py_None ? NULL : Py_NewRef(target);
        w.n_picked = PyTuple_GET_SIZE(picked);
        w.index = PyMem_Calloc((size_t)w.n_picked + 1, sizeof(int32_t));
        ways = PyMem_Realloc(s->ways, (size_t)(s->n_ways + 1) * sizeof(way));
        s->ways = ways != NULL ? ways : s->ways;
        if (w.index == NULL || ways == NULL) {
            PyErr_NoMemory();
        }
        ok = w.index != NULL && ways != NULL && read_indices(&w, picked, s->n_held);
        if (ok && w.target == NULL && w.n_picked + count == 0) {
            PyErr_SetString(PyExc_IndexError, "a program that is over has a result");
            ok = false;
        }
    }
    Py_DECREF(found);
    if (!ok) {
        Py_XDECREF(w.target);
        PyMem_Free(w.index);
        return NULL;
    }
    ways[s->n_ways] = w;
    return &ways[s->n_ways++];
}

static way *
way_of(step *s, Py_ssize_t offset, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < s->n_ways; i++) {
        if (s->ways[i].offset == offset && s->ways[i].count == count) {
            return &s->ways[i];
        }
    }
    return new_way(s, offset, count);
}

/* ---- operations ---- */

typedef enum { DONE, RAISED, NOT_HERE } verdict;

static verdict
do_test(step *s, PyObject *values, outcome *out, read_state *reads)
{
    PyObject *operand = PyTuple_GET_ITEM(values, s->n_held), *number;
    PyObject *is_true = (PyObject *)&PyBool_Type;
    int truth = mj_read(reads, is_true, operand, values, s->n_held, &number);
    if (truth > 0) {
        truth = PyObject_IsTrue(number);
        Py_DECREF(number);
    }
    else if (truth == 0) {
        mj_effects += !mj_is_plain(operand);
        truth = PyObject_IsTrue(operand);
    }
    if (truth < 0) {
        return RAISED;
    }
    out->offset = (truth != 0) == s->jumps_if ? s->target : s->following;
    return DONE;
}

/* The items of a tuple or list; taken from its end, as UNPACK_SEQUENCE leaves them. */
static verdict
unpack(step *s, PyObject *value, outcome *out)
{
    bool is_tuple = PyTuple_CheckExact(value);
    if ((!is_tuple && !PyList_CheckExact(value)) || Py_SIZE(value) != s->unpacks) {
        return NOT_HERE;
    }
    for (Py_ssize_t i = s->unpacks; i-- > 0;) {
        PyObject *item = is_tuple ? PyTuple_GET_ITEM(value, i) : PyList_GET_ITEM(value, i);
        out->value[out->n++] = Py_NewRef(item);
    }
    out->offset = s->unpacked;
    Py_DECREF(value);
    return DONE;
}

static verdict
python_follows(step *s, PyObject *left, outcome *out);

static verdict
do_next(step *s, PyObject *iterator, outcome *out)
{
    if (!PyIter_Check(iterator)) {
        return NOT_HERE;
    }
    mj_effects += !mj_is_plain_iterator(iterator);
    PyObject *value = Py_TYPE(iterator)->tp_iternext(iterator);
    if (value == NULL) {
        if (PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_StopIteration)) {
                return RAISED;
            }
            PyErr_Clear();
        }
        out->offset = s->target;
        return DONE;
    }
    out->value[out->n++] = Py_NewRef(iterator);
    if (s->unpacks >= 0) {
        if (unpack(s, value, out) == DONE) {
            return DONE;
        }
        out->n = 0;
        PyObject *left = Py_BuildValue("(NN)", iterator, value);
        return left != NULL ? python_follows(s, left, out) : RAISED;
    }
    out->value[out->n++] = value;
    out->offset = s->following;
    return DONE;
}

/* done: a tuple (offset, left); stolen. */
static verdict
read_outcome(PyObject *done, outcome *out)
{
    PyObject *left;
    verdict v = RAISED;
    if (done != NULL && PyArg_ParseTuple(done, "nO!", &out->offset, &PyTuple_Type, &left)) {
        out->many = Py_NewRef(left);
        out->n = PyTuple_GET_SIZE(left);
        v = DONE;
    }
    Py_XDECREF(done);
    return v;
}

/* What belongs to the operation, too; left: stolen. */
static verdict
python_follows(step *s, PyObject *left, outcome *out)
{
    PyObject *done = PyObject_CallMethod(s->point, "follow", "nN", s->following, left);
    return read_outcome(done, out);
}

static verdict
python_performs(step *s, PyObject *values, outcome *out)
{
    PyObject *held = PyTuple_GetSlice(values, 0, s->n_held);
    PyObject *operands = PyTuple_GetSlice(values, s->n_held, PyTuple_GET_SIZE(values));
    PyObject *done = held != NULL && operands != NULL
                         ? PyObject_CallMethod(s->point, "perform", "OO", held, operands)
                         : NULL;
    Py_XDECREF(held);
    Py_XDECREF(operands);
    return read_outcome(done, out);
}

/* A call of a function with one argument: of a tensor's number, perhaps. */
static verdict
do_read(step *s, PyObject *values, outcome *out, read_state *reads)
{
    PyObject *function = PyTuple_GET_ITEM(values, s->n_held), *number;
    PyObject *tensor = PyTuple_GET_ITEM(values, s->n_held + 1);
    int found = 0;
    if (mj_reads(function)) {
        found = mj_read(reads, function, tensor, values, s->n_held, &number);
    }
    if (found <= 0) {
        return found < 0 ? RAISED : NOT_HERE;
    }
    PyObject *left = PyTuple_Pack(1, number);
    Py_DECREF(number);
    return left != NULL ? python_follows(s, left, out) : RAISED;
}

/* No instruction runs code of a program on those. */
static bool
are_numbers(PyObject *values, Py_ssize_t first)
{
    for (Py_ssize_t i = first; i < PyTuple_GET_SIZE(values); i++) {
        PyObject *value = PyTuple_GET_ITEM(values, i);
        if (!PyLong_CheckExact(value) && !PyFloat_CheckExact(value) && !PyBool_Check(value)) {
            return false;
        }
    }
    return PyTuple_GET_SIZE(values) > first;
}

static verdict
perform(step *s, PyObject *values, outcome *out, read_state *reads)
{
    verdict v = NOT_HERE;
    Py_ssize_t n_operands = PyTuple_GET_SIZE(values) - s->n_held;
    s->done++;
    if (s->kind == STEP_TEST && n_operands == 1) {
        v = do_test(s, values, out, reads);
    }
    else if (s->kind == STEP_NEXT && n_operands == 1) {
        v = do_next(s, PyTuple_GET_ITEM(values, s->n_held), out);
    }
    else if (s->kind == STEP_READ && n_operands == 2) {
        v = do_read(s, values, out, reads);
    }
    if (v != NOT_HERE) {
        return v;
    }
    mj_effects += !are_numbers(values, s->n_held);
    return python_performs(s, values, out);
}

/* An exception is set: the frames go on from there. */
static PyObject *
go_on_raising(step *s, PyObject *values)
{
    PyObject *type, *error, *traceback, *result = NULL;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(error, traceback);
    }
    PyObject *held = PyTuple_GetSlice(values, 0, s->n_held);
    if (held != NULL) {
        result = PyObject_CallMethod(s->point, "raising", "ON", error, held);
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return result;
}

/* ---- from region to region ---- */

static inline PyObject *
left_item(const outcome *out, Py_ssize_t i)
{
    return Py_NewRef(out->many != NULL ? PyTuple_GET_ITEM(out->many, i) : out->value[i]);
}

static void
clear_outcome(outcome *out)
{
    for (Py_ssize_t i = 0; out->many == NULL && i < out->n; i++) {
        Py_DECREF(out->value[i]);
    }
    Py_CLEAR(out->many);
    out->n = 0;
}

/* values, out: given away, so that nothing is kept alive that no frame needs. */
static PyObject *
enter_region(const way *w, PyObject *values, outcome *out, read_state *reads)
{
    PyObject *small[MOST_ON_STACK], **args = small, *result = NULL;
    Py_ssize_t n = w->n_picked + out->n;
    if (n + 1 > MOST_ON_STACK) {
        args = PyMem_Malloc((size_t)(n + 1) * sizeof(PyObject *));
    }
    if (args != NULL) {
        for (Py_ssize_t i = 0; i < w->n_picked; i++) {
            args[1 + i] = Py_NewRef(PyTuple_GET_ITEM(values, w->index[i]));
        }
        for (Py_ssize_t i = 0; i < out->n; i++) {
            args[1 + w->n_picked + i] = left_item(out, i);
        }
    }
    PyObject *target = Py_NewRef(w->target); /* the ways may be forgotten meanwhile */
    clear_outcome(out);
    Py_DECREF(values);
    if (args == NULL) {
        PyErr_NoMemory();
    }
    else {
        mj_read_keep(reads, args + 1, n);
        size_t flags = (size_t)n | PY_VECTORCALL_ARGUMENTS_OFFSET;
        result = PyObject_Vectorcall(target, args + 1, flags, NULL);
        for (Py_ssize_t i = 0; i < n; i++) {
            Py_DECREF(args[1 + i]);
        }
    }
    if (args != small) {
        PyMem_Free(args);
    }
    Py_DECREF(target);
    return result;
}

/* One operation and the region behind it; values: stolen. */
static PyObject *
advance(step *s, PyObject *values, read_state *reads)
{
    outcome out = {.n = 0};
    PyObject *result;
    if (perform(s, values, &out, reads) == RAISED) {
        clear_outcome(&out);
        result = go_on_raising(s, values);
        Py_DECREF(values);
        return result;
    }
    way *w = way_of(s, out.offset, out.n);
    if (w != NULL && w->target != NULL) {
        return enter_region(w, values, &out, reads);
    }
    if (w == NULL) {
        result = NULL;
    }
    else if (out.n > 0) {
        result = left_item(&out, out.n - 1);
    }
    else {
        result = Py_NewRef(PyTuple_GET_ITEM(values, w->index[w->n_picked - 1]));
    }
    clear_outcome(&out);
    Py_DECREF(values);
    return result;
}

static bool
are_values(step *s, PyObject *values)
{
    if (PyTuple_CheckExact(values) && PyTuple_GET_SIZE(values) >= s->n_held) {
        return true;
    }
    PyErr_SetString(PyExc_TypeError, "expected a tuple of what the frames hold, and the operands");
    return false;
}

static PyObject *
step_drive(PyObject *self, PyObject *values)
{
    step *s = (step *)Py_NewRef(self);
    if (!are_values(s, values)) {
        Py_DECREF(s);
        return NULL;
    }
    read_state reads = {NULL, NULL, 0};
    PyObject *result = advance(s, Py_NewRef(values), &reads);
    while (result != NULL && Py_TYPE(result) == &pending_type) {
        pending *p = (pending *)result;
        Py_SETREF(s, (step *)Py_NewRef((PyObject *)p->step));
        PyObject *given = Py_NewRef(p->values);
        Py_DECREF(p);
        result = advance(s, given, &reads);
    }
    mj_read_clear(&reads);
    Py_DECREF(s);
    return result;
}

/* step(values) = Pending(step, values) */
static PyObject *
step_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    if (PyVectorcall_NARGS(nargsf) != 1 || kwnames != NULL) {
        PyErr_SetString(PyExc_TypeError, "expected one tuple");
        return NULL;
    }
    if (!are_values((step *)self, args[0])) {
        return NULL;
    }
    pending *p = PyObject_GC_New(pending, &pending_type);
    if (p != NULL) {
        p->step = (step *)Py_NewRef(self);
        p->values = Py_NewRef(args[0]);
        PyObject_GC_Track((PyObject *)p);
    }
    return (PyObject *)p;
}

static PyObject *
step_forget(PyObject *self, PyObject *unused)
{
    forget_ways((step *)self);
    Py_RETURN_NONE;
}

/* ---- the types ---- */

static PyObject *
step_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"point",  "find_way", "kind",     "held", "following",
                               "target", "jumps_if", "unpacks", "unpacked", NULL};
    PyObject *point, *find_way;
    int kind = STEP_PYTHON, jumps_if = 0;
    Py_ssize_t held, following, target, unpacks = -1, unpacked = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOinnn|pnn:Step", keywords, &point, &find_way,
                                     &kind, &held, &following, &target, &jumps_if, &unpacks,
                                     &unpacked)) {
        return NULL;
    }
    if (kind < STEP_PYTHON || kind > STEP_READ || held < 0 || unpacks >= MOST_LEFT) {
        PyErr_SetString(PyExc_ValueError, "no such step");
        return NULL;
    }
    step *s = (step *)type->tp_alloc(type, 0);
    if (s != NULL) {
        s->vectorcall = step_call;
        s->point = Py_NewRef(point);
        s->find_way = Py_NewRef(find_way);
        s->kind = (step_kind)kind;
        s->jumps_if = jumps_if != 0;
        s->n_held = held;
        s->following = following;
        s->target = target;
        s->unpacks = unpacks;
        s->unpacked = unpacked;
    }
    return (PyObject *)s;
}

static int
step_traverse(PyObject *self, visitproc visit, void *arg)
{
    step *s = (step *)self;
    Py_VISIT(s->point);
    Py_VISIT(s->find_way);
    for (Py_ssize_t i = 0; i < s->n_ways; i++) {
        Py_VISIT(s->ways[i].target);
    }
    return 0;
}

static int
step_clear(PyObject *self)
{
    forget_ways((step *)self); /* point and find_way stay: a call under way may still need them */
    return 0;
}

static void
step_dealloc(PyObject *self)
{
    step *s = (step *)self;
    PyObject_GC_UnTrack(self);
    if (s->weakrefs != NULL) {
        PyObject_ClearWeakRefs(self);
    }
    forget_ways(s);
    Py_CLEAR(s->point);
    Py_CLEAR(s->find_way);
    Py_TYPE(self)->tp_free(self);
}

static int
pending_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((pending *)self)->step);
    Py_VISIT(((pending *)self)->values);
    return 0;
}

static void
pending_dealloc(PyObject *self)
{
    pending *p = (pending *)self;
    PyObject_GC_UnTrack(self);
    Py_DECREF(p->step);
    Py_DECREF(p->values);
    PyObject_GC_Del(self);
}

static PyMethodDef step_methods[] = {
    {"drive", step_drive, METH_O, "drive(values): go on from here to the end of the program"},
    {"forget", step_forget, METH_NOARGS, "forget(): find the ways anew"},
    {NULL},
};

static PyMemberDef step_members[] = {
    {"point", T_OBJECT, offsetof(step, point), READONLY, "the cut point"},
    {"done", T_ULONGLONG, offsetof(step, done), READONLY, "how often the operation was done"},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(step, weakrefs), READONLY, NULL},
    {NULL},
};

static PyMemberDef pending_members[] = {
    {"step", T_OBJECT, offsetof(pending, step), READONLY, "what comes next"},
    {"values", T_OBJECT, offsetof(pending, values), READONLY, "of the frames, then the operands"},
    {NULL},
};

static PyTypeObject step_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "magjit._C.Step",
    .tp_basicsize = sizeof(step),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "Step(point, find_way, kind, held, following, target, jumps_if=False, unpacks=-1, "
              "unpacked=-1): called with values it gives Pending(step, values)",
    .tp_new = step_new,
    .tp_dealloc = step_dealloc,
    .tp_traverse = step_traverse,
    .tp_clear = step_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(step, vectorcall),
    .tp_weaklistoffset = offsetof(step, weakrefs),
    .tp_methods = step_methods,
    .tp_members = step_members,
};

static PyTypeObject pending_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "magjit._C.Pending",
    .tp_basicsize = sizeof(pending),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "A call that has come to a cut.",
    .tp_dealloc = pending_dealloc,
    .tp_traverse = pending_traverse,
    .tp_members = pending_members,
};

int
mj_init_step(PyObject *module)
{
    if (PyModule_AddType(module, &step_type) < 0) {
        return -1;
    }
    return PyModule_AddType(module, &pending_type);
}
