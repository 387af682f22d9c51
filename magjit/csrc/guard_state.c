/* Global states: one captured, compared with the one of now.
 *
 *     state := {name: value}
 *
 * Modes are compared by identity, except that of `with torch.device(...)`, which is made anew each
 * time and compared by its device.
 */
#include "guard_state.h"

typedef struct {
    const entry *entry;
    uint8_t (*byte)(void *); /* what reads an entry of the kind K_BYTE: most are; else NULL */
    int64_t number;
    PyObject *value; /* of an entry that is not a number; NULL: not known then */
    uint64_t mark;   /* with which the value was the same the last time; 0: not known */
} state_item;

struct global_state {
    int n;
    state_item item[];
};

/* ---- comparison ---- */

/* The device of a `with torch.device(...)`, borrowed; NULL: not known. */
static PyObject *
device_of(PyObject *mode)
{
    static PyObject *name;
    PyObject **dict = _PyObject_GetDictPtr(mode), *device;
    if (name == NULL && (name = PyUnicode_InternFromString("device")) == NULL) {
        PyErr_Clear();
        return NULL;
    }
    bool found = dict != NULL && *dict != NULL &&
                 mj_dict_get(*dict, name, PyObject_Hash(name), &device) == V_YES;
    return found ? device : NULL;
}

static bool
same_mode(PyObject *a, PyObject *b)
{
    if (a == b) {
        return true;
    }
    if ((PyObject *)Py_TYPE(a) != mj_device_context_type || Py_TYPE(a) != Py_TYPE(b)) {
        return false;
    }
    PyObject *x = device_of(a), *y = device_of(b);
    return x != NULL && y != NULL && mj_value_eq(x, y) == V_YES;
}

static bool
same_modes(PyObject *expected, PyObject *now)
{
    Py_ssize_t n = PyTuple_GET_SIZE(expected);
    if (n != PyTuple_GET_SIZE(now)) {
        return false;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!same_mode(PyTuple_GET_ITEM(expected, i), PyTuple_GET_ITEM(now, i))) {
            return false;
        }
    }
    return true;
}

static bool
value_holds(state_item *item)
{
    const entry *e = item->entry;
    PyObject *expected = item->value;
    uint64_t mark = mj_entry_mark(e);
    if (mark != 0 && mark == item->mark) {
        return true;
    }
    if (e->kind == K_STACK && expected != NULL && PyTuple_GET_SIZE(expected) == 0) {
        return mj_entry_stack_is_empty(e);
    }
    PyObject *now = mj_entry_value(e);
    bool same = expected == now;
    if (!same && expected != NULL && now != NULL) {
        same = e->kind == K_STACK ? same_modes(expected, now) : mj_value_eq(expected, now) == V_YES;
    }
    Py_XDECREF(now);
    item->mark = same ? mark : 0;
    return same;
}

bool
mj_state_check(global_state *state)
{
    void *context = mj_state_library.context;
    state_item *item = state->item, *end = item + state->n;
    for (; item < end; item++) {
        bool same = item->byte != NULL                ? item->byte(context) == item->number
                    : mj_entry_is_number(item->entry) ? mj_entry_number(item->entry) == item->number
                                                      : value_holds(item);
        if (!same) {
            return false;
        }
    }
    return true;
}

/* ---- capture, and to and from dicts ---- */

static void
append(global_state *state, const entry *e, int64_t number, PyObject *value)
{
    state_item *item = &state->item[state->n++];
    bool is_byte = e->kind == K_BYTE && mj_entry_is_number(e);
    *item = (state_item){.entry = e, .number = number, .value = value};
    *(void **)&item->byte = is_byte ? e->function : NULL;
}

static bool
take_given(global_state *state, const entry *e, PyObject *value)
{
    int64_t number = 0;
    if (mj_entry_is_number(e)) {
        if (!PyLong_Check(value)) {
            return false;
        }
        number = PyLong_AsLongLong(value);
    }
    else if (e->kind == K_STACK && !PyTuple_CheckExact(value)) {
        return false;
    }
    bool known = !mj_entry_is_number(e) && value != mj_null;
    append(state, e, number, known ? Py_NewRef(value) : NULL);
    return true;
}

static bool
fill(global_state *state, PyObject *given)
{
    Py_ssize_t known = 0;
    for (int i = 0; i < mj_n_entries; i++) {
        const entry *e = &mj_entries[i];
        if (given != NULL) {
            PyObject *value = PyDict_GetItemString(given, e->name);
            known += value != NULL;
            if (value != NULL && e->present && !take_given(state, e, value)) {
                return false;
            }
        }
        else if (e->present) {
            bool number = mj_entry_is_number(e);
            append(state, e, number ? mj_entry_number(e) : 0, number ? NULL : mj_entry_value(e));
        }
    }
    return given == NULL || known == PyDict_GET_SIZE(given);
}

global_state *
mj_state_parse(PyObject *given)
{
    if (mj_entries_prepare() < 0 || (given != NULL && !PyDict_CheckExact(given))) {
        return NULL;
    }
    global_state *state =
        PyMem_Calloc(1, sizeof(global_state) + (size_t)mj_n_entries * sizeof(state_item));
    if (state == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (!fill(state, given)) {
        mj_state_free(state);
        return NULL;
    }
    return state;
}

void
mj_state_free(global_state *state)
{
    for (int i = 0; state != NULL && i < state->n; i++) {
        Py_XDECREF(state->item[i].value);
    }
    PyMem_Free(state);
}

int
mj_state_traverse(global_state *state, visitproc visit, void *arg)
{
    for (int i = 0; state != NULL && i < state->n; i++) {
        Py_VISIT(state->item[i].value);
    }
    return 0;
}

static PyObject *
global_state_of(PyObject *module, PyObject *unused)
{
    global_state *state = mj_state_parse(NULL);
    PyObject *dict = state != NULL ? PyDict_New() : NULL;
    for (int i = 0; dict != NULL && i < state->n; i++) {
        const entry *e = state->item[i].entry;
        PyObject *value = state->item[i].value;
        value = mj_entry_is_number(e) ? PyLong_FromLongLong(state->item[i].number)
                                      : Py_NewRef(value != NULL ? value : mj_null);
        if (value == NULL || PyDict_SetItemString(dict, e->name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    mj_state_free(state);
    return dict;
}

static PyMethodDef methods[] = {
    {"global_state", global_state_of, METH_NOARGS,
     "global_state(): {name: value} of torch's global state as a guard program compares it"},
    {NULL},
};

int
mj_init_global_state(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
