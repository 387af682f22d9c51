/* The tracer's tables: plans, the stack of frames, suspended generators, trivial types. */
#include "tracer.h"

/* ---- code objects ---- */

static void
code_free(mj_code *item)
{
    Py_XDECREF(item->code);
    Py_XDECREF(item->plan);
    PyMem_Free(item);
}

static int
codes_grow(Tracer *tracer)
{
    size_t size = tracer->codes == NULL ? 64 : (tracer->codes_mask + 1) * 2;
    mj_code **table = PyMem_Calloc(size, sizeof(*table));
    if (table == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; tracer->codes != NULL && i <= tracer->codes_mask; i++) {
        mj_code *item = tracer->codes[i];
        if (item != NULL) {
            size_t slot = mj_hash_pointer(item->code) & (size - 1);
            while (table[slot] != NULL) {
                slot = (slot + 1) & (size - 1);
            }
            table[slot] = item;
        }
    }
    PyMem_Free(tracer->codes);
    tracer->codes = table;
    tracer->codes_mask = size - 1;
    return 0;
}

mj_code *
mj_code_find(Tracer *tracer, PyCodeObject *code)
{
    if (tracer->codes == NULL || tracer->codes_used * 2 > tracer->codes_mask) {
        if (codes_grow(tracer) < 0) {
            return NULL;
        }
    }
    size_t slot = mj_hash_pointer(code) & tracer->codes_mask;
    while (tracer->codes[slot] != NULL) {
        if (tracer->codes[slot]->code == code) {
            return tracer->codes[slot];
        }
        slot = (slot + 1) & tracer->codes_mask;
    }
    mj_code *item = PyMem_Calloc(1, sizeof(*item));
    if (item == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    item->code = (PyCodeObject *)Py_NewRef(code);
    tracer->codes[slot] = item;
    tracer->codes_used++;
    return item;
}

int
mj_code_load_plan(Tracer *tracer, mj_code *item)
{
    if (item->plan != NULL) {
        return 0;
    }
    PyObject *plan = PyObject_CallOneArg(tracer->plan_for, (PyObject *)item->code);
    if (plan == NULL) {
        return -1;
    }
    PyObject *units = PyObject_GetAttrString(plan, "units");
    Py_DECREF(plan);
    if (units == NULL) {
        return -1;
    }
    Py_ssize_t n_units = Py_SIZE(item->code);
    if (!PyBytes_CheckExact(units) ||
        PyBytes_GET_SIZE(units) != n_units * (Py_ssize_t)sizeof(mj_unit)) {
        PyErr_Format(PyExc_TypeError, "plan of %U: units must be bytes, %zd for each code unit",
                     item->code->co_qualname, sizeof(mj_unit));
        Py_DECREF(units);
        return -1;
    }
    item->plan = units;
    item->units = (const mj_unit *)PyBytes_AS_STRING(units);
    item->n_units = n_units;
    return 0;
}

/* ---- the stack of frames ---- */

static inline uint16_t *
present_count(Tracer *tracer, const mj_frame *frame)
{
    return &tracer->present[mj_hash_pointer(frame) & (MJ_PRESENT - 1)];
}

mj_entry *
mj_entry_find(Tracer *tracer, const mj_frame *frame)
{
    if (*present_count(tracer, frame) == 0) {
        return NULL;
    }
    for (Py_ssize_t i = tracer->depth - 1; i >= 0; i--) {
        if (tracer->entries[i].frame == frame) {
            return &tracer->entries[i];
        }
    }
    return NULL;
}

mj_entry *
mj_entry_push(Tracer *tracer, mj_frame *frame, mj_code *code, PyObject *state)
{
    if (tracer->depth == tracer->capacity) {
        Py_ssize_t capacity = tracer->capacity == 0 ? 64 : tracer->capacity * 2;
        mj_entry *entries = PyMem_Realloc(tracer->entries, (size_t)capacity * sizeof(*entries));
        if (entries == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        tracer->entries = entries;
        tracer->capacity = capacity;
    }
    mj_entry *entry = &tracer->entries[tracer->depth++];
    *entry = (mj_entry){
        .frame = frame, .code = code, .state = Py_XNewRef(state), .opaque = state == NULL};
    ++*present_count(tracer, frame);
    return entry;
}

void
mj_entry_pop(Tracer *tracer)
{
    mj_entry entry = tracer->entries[--tracer->depth];
    --*present_count(tracer, entry.frame);
    Py_XDECREF(entry.pending);
    Py_XDECREF(entry.wake);
    Py_XDECREF(entry.state);
}

/* Frames whose exit nobody reported (they left while observation was paused). */
void
mj_entries_drop_above(Tracer *tracer, Py_ssize_t depth)
{
    while (tracer->depth > depth) {
        mj_entry_pop(tracer);
    }
}

static bool
frame_is_running(PyThreadState *tstate, const mj_frame *wanted)
{
    for (mj_frame *frame = mj_frame_top(tstate); frame != NULL; frame = frame->previous) {
        if (frame == wanted) {
            return true;
        }
    }
    return false;
}

void
mj_entries_drop_dead(Tracer *tracer)
{
    while (tracer->depth > 0 &&
           !frame_is_running(tracer->tstate, tracer->entries[tracer->depth - 1].frame)) {
        mj_entry_pop(tracer);
    }
}

/* ---- suspended generators ---- */

static bool
is_dead(PyObject *reference)
{
#if MJ_PY313
    PyObject *object;
    bool dead = PyWeakref_GetRef(reference, &object) != 1;
    if (!dead) {
        Py_DECREF(object);
    }
    return dead;
#else
    return PyWeakref_GET_OBJECT(reference) == Py_None;
#endif
}

void
mj_suspended_remove(Tracer *tracer, mj_suspended *found)
{
    mj_suspended item = *found;
    *found = tracer->suspended[--tracer->n_suspended];
    Py_XDECREF(item.generator);
    Py_XDECREF(item.state);
    Py_XDECREF(item.pending);
}

void
mj_suspended_drop_dead(Tracer *tracer)
{
    for (Py_ssize_t i = tracer->n_suspended - 1; i >= 0 && i < tracer->n_suspended; i--) {
        if (is_dead(tracer->suspended[i].generator)) {
            /* the last one, which was looked at already, takes its place */
            mj_suspended_remove(tracer, &tracer->suspended[i]);
        }
    }
}

static int
suspended_grow(Tracer *tracer)
{
    mj_suspended_drop_dead(tracer);
    if (tracer->n_suspended * 2 < tracer->suspended_capacity) {
        return 0;
    }
    Py_ssize_t capacity = tracer->suspended_capacity == 0 ? 8 : tracer->suspended_capacity * 2;
    mj_suspended *items = PyMem_Realloc(tracer->suspended, (size_t)capacity * sizeof(*items));
    if (items == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    tracer->suspended = items;
    tracer->suspended_capacity = capacity;
    return 0;
}

int
mj_suspend(Tracer *tracer, const mj_entry *entry, bool ignored, mj_frame *frame)
{
    if (tracer->n_suspended == tracer->suspended_capacity && suspended_grow(tracer) < 0) {
        return -1;
    }
    PyObject *generator = PyWeakref_NewRef(mj_frame_generator(frame), NULL);
    if (generator == NULL) {
        return -1;
    }
    mj_suspended item = {.frame = frame, .generator = generator, .ignored = ignored};
    if (entry != NULL) {
        item.code = entry->code;
        item.state = Py_XNewRef(entry->state);
        item.pending = Py_XNewRef(entry->pending);
        item.pending_unit = entry->pending_unit;
    }
    tracer->suspended[tracer->n_suspended++] = item;
    return 0;
}

/* The waiting entry of this generator's frame, or NULL.
 *
 * The frame is part of the generator, so its address tells which generator it is as long as that
 * lives.  A dead weak reference does not mean that the generator is gone: its finalizer runs after
 * that and resumes the frame with GeneratorExit.  A new generator at the address of one that died
 * is told apart by its first entry, or, if that was not seen because observation was paused, by the
 * end of the pause, which drops the dead. */
mj_suspended *
mj_suspended_find(Tracer *tracer, const mj_frame *frame, bool first)
{
    for (Py_ssize_t i = tracer->n_suspended - 1; i >= 0; i--) {
        mj_suspended *item = &tracer->suspended[i];
        if (item->frame != frame) {
            continue;
        }
        if (!first) {
            return item;
        }
        mj_suspended_remove(tracer, item);
        return NULL;
    }
    return NULL;
}

/* ---- trivial types ---- */

int
mj_trivial_build(Tracer *tracer, PyObject *types)
{
    size_t size = 16;
    while (size < 4 * (size_t)PySet_GET_SIZE(types)) {
        size *= 2;
    }
    tracer->trivial_slots = PyMem_Calloc(size, sizeof(mj_type_slot));
    if (tracer->trivial_slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    tracer->trivial_mask = size - 1;
    PyObject *iterator = PyObject_GetIter(types), *item;
    if (iterator == NULL) {
        return -1;
    }
    while ((item = PyIter_Next(iterator)) != NULL) {
        if (!PyType_Check(item)) {
            PyErr_Format(PyExc_TypeError, "trivial: %R is not a type", item);
            Py_DECREF(item);
            break;
        }
        size_t slot = mj_hash_pointer(item) & tracer->trivial_mask;
        while (tracer->trivial_slots[slot].type != NULL) {
            slot = (slot + 1) & tracer->trivial_mask;
        }
        tracer->trivial_slots[slot].type = (PyTypeObject *)item; /* kept alive by tracer->trivial */
        Py_DECREF(item);
    }
    Py_DECREF(iterator);
    return PyErr_Occurred() ? -1 : 0;
}

bool
mj_trivial_contains(const Tracer *tracer, const PyTypeObject *type)
{
    size_t slot = mj_hash_pointer(type) & tracer->trivial_mask;
    while (tracer->trivial_slots[slot].type != NULL) {
        if (tracer->trivial_slots[slot].type == type) {
            return true;
        }
        slot = (slot + 1) & tracer->trivial_mask;
    }
    return false;
}

/* ---- everything ---- */

void
mj_tables_clear(Tracer *tracer)
{
    mj_entries_drop_above(tracer, 0);
    while (tracer->n_suspended > 0) {
        mj_suspended_remove(tracer, &tracer->suspended[tracer->n_suspended - 1]);
    }
    mj_code **codes = tracer->codes;
    size_t mask = tracer->codes_mask;
    tracer->codes = NULL;
    tracer->codes_used = 0;
    for (size_t i = 0; codes != NULL && i <= mask; i++) {
        if (codes[i] != NULL) {
            code_free(codes[i]);
        }
    }
    PyMem_Free(codes);
}

int
mj_tables_traverse(Tracer *tracer, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; i < tracer->depth; i++) {
        Py_VISIT(tracer->entries[i].state);
        Py_VISIT(tracer->entries[i].pending);
        Py_VISIT(tracer->entries[i].wake);
    }
    for (Py_ssize_t i = 0; i < tracer->n_suspended; i++) {
        Py_VISIT(tracer->suspended[i].generator);
        Py_VISIT(tracer->suspended[i].state);
        Py_VISIT(tracer->suspended[i].pending);
    }
    for (size_t i = 0; tracer->codes != NULL && i <= tracer->codes_mask; i++) {
        if (tracer->codes[i] != NULL) {
            Py_VISIT(tracer->codes[i]->code);
        }
    }
    return 0;
}
