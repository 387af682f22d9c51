/* Comparisons and look-ups that never run user code.
 *
 * dict look-ups of CPython call __eq__ of stored keys whose hash collides; here such a key makes
 * the answer V_UNKNOWN, which fails the guard.
 */
#define Py_BUILD_CORE 1
#include "guard.h"

#undef _PyGC_FINALIZED
#include <internal/pycore_dict.h>
#undef Py_BUILD_CORE
#include <structmember.h>

/* As in dictobject.c, all three versions. */
#define DICT_PERTURB_SHIFT 5

static PyTypeObject *torch_device_type;
static PyTypeObject *torch_size_type;
/* Where range keeps start, stop and step. */
static Py_ssize_t range_fields[3];
static bool range_known;
static bool odict_known;

void
mj_value_set_torch_types(PyTypeObject *device, PyTypeObject *size)
{
    Py_XINCREF(device);
    Py_XINCREF(size);
    Py_XSETREF(torch_device_type, device);
    Py_XSETREF(torch_size_type, size);
}

/* ---- values ---- */

static verdict value_eq(PyObject *a, PyObject *b, int depth);

static verdict
richcompare_eq(PyTypeObject *type, PyObject *a, PyObject *b)
{
    PyObject *result = type->tp_richcompare(a, b, Py_EQ);
    if (result == NULL) {
        PyErr_Clear();
        return V_UNKNOWN;
    }
    verdict v = result == Py_True ? V_YES : result == Py_False ? V_NO : V_UNKNOWN;
    Py_DECREF(result);
    return v;
}

static verdict
fields_eq(PyObject *const *a, PyObject *const *b, Py_ssize_t n, int depth)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        verdict v = value_eq(a[i], b[i], depth + 1);
        if (v != V_YES) {
            return v;
        }
    }
    return V_YES;
}

static verdict
range_eq(PyObject *a, PyObject *b, int depth)
{
    if (!range_known) {
        return V_UNKNOWN;
    }
    for (int i = 0; i < 3; i++) {
        PyObject *x = *(PyObject **)((char *)a + range_fields[i]);
        PyObject *y = *(PyObject **)((char *)b + range_fields[i]);
        verdict v = value_eq(x, y, depth + 1);
        if (v != V_YES) {
            return v;
        }
    }
    return V_YES;
}

static verdict
value_eq(PyObject *a, PyObject *b, int depth)
{
    if (a == b) {
        return V_YES;
    }
    PyTypeObject *type = Py_TYPE(a);
    if (type != Py_TYPE(b)) {
        return V_NO;
    }
    if (type == &PyLong_Type || type == &PyUnicode_Type || type == &PyBytes_Type ||
        type == torch_device_type) {
        return richcompare_eq(type, a, b);
    }
    if (type == &PyFloat_Type) {
        /* Bitwise: nan equals nan, 0.0 differs from -0.0. */
        double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
        return memcmp(&x, &y, sizeof(x)) == 0 ? V_YES : V_NO;
    }
    if (type == &PyComplex_Type) {
        Py_complex x = ((PyComplexObject *)a)->cval, y = ((PyComplexObject *)b)->cval;
        return memcmp(&x, &y, sizeof(x)) == 0 ? V_YES : V_NO;
    }
    if (depth > 32) {
        return V_UNKNOWN;
    }
    if (type == &PyTuple_Type || type == torch_size_type) {
        Py_ssize_t n = PyTuple_GET_SIZE(a);
        if (n != PyTuple_GET_SIZE(b)) {
            return V_NO;
        }
        return fields_eq(&PyTuple_GET_ITEM(a, 0), &PyTuple_GET_ITEM(b, 0), n, depth);
    }
    if (type == &PySlice_Type) {
        return fields_eq(&((PySliceObject *)a)->start, &((PySliceObject *)b)->start, 3, depth);
    }
    if (type == &PyRange_Type) {
        return range_eq(a, b, depth);
    }
    return type == &PyBool_Type ? V_NO : V_UNKNOWN;
}

verdict
mj_value_eq(PyObject *a, PyObject *b)
{
    return value_eq(a, b, 0);
}

/* ---- dict look-up ---- */

static Py_ssize_t
dk_index_at(PyDictKeysObject *keys, size_t i)
{
    int log2_bytes = keys->dk_log2_index_bytes - keys->dk_log2_size;
    switch (log2_bytes) {
    case 0:
        return ((int8_t *)keys->dk_indices)[i];
    case 1:
        return ((int16_t *)keys->dk_indices)[i];
    case 2:
        return ((int32_t *)keys->dk_indices)[i];
    default:
        return (Py_ssize_t)((int64_t *)keys->dk_indices)[i];
    }
}

/* What dict would find out by __eq__ of two keys with the same hash. */
static verdict
key_eq(PyObject *stored, PyObject *key)
{
    verdict v = mj_value_eq(stored, key);
    if (v == V_NO) {
        /* Keys of different types, or 0.0 and -0.0, may still be equal for dict. */
        PyTypeObject *type = Py_TYPE(stored);
        bool plain = type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBytes_Type;
        if (type != Py_TYPE(key) || !plain) {
            return V_UNKNOWN;
        }
    }
    return v;
}

static PyObject *
entry_value(PyDictObject *d, Py_ssize_t ix)
{
    if (d->ma_values != NULL) {
        return d->ma_values->values[ix];
    }
    PyDictKeysObject *keys = d->ma_keys;
    return DK_IS_UNICODE(keys) ? DK_UNICODE_ENTRIES(keys)[ix].me_value
                               : DK_ENTRIES(keys)[ix].me_value;
}

/* The probe sequence of dictobject.c, without its calls of __eq__. */
static verdict
probe(PyDictObject *d, PyObject *key, Py_hash_t hash, PyObject **value)
{
    PyDictKeysObject *keys = d->ma_keys;
    size_t mask = (size_t)DK_SIZE(keys) - 1;
    size_t perturb = (size_t)hash, i = (size_t)hash & mask;
    bool unicode = DK_IS_UNICODE(keys);
    for (;;) {
        Py_ssize_t ix = dk_index_at(keys, i);
        if (ix == DKIX_EMPTY) {
            return V_NO;
        }
        if (ix >= 0) {
            PyObject *stored =
                unicode ? DK_UNICODE_ENTRIES(keys)[ix].me_key : DK_ENTRIES(keys)[ix].me_key;
            verdict v = V_NO;
            if (stored == key) {
                v = V_YES;
            }
            else if (stored != NULL) {
                Py_hash_t h =
                    unicode ? ((PyASCIIObject *)stored)->hash : DK_ENTRIES(keys)[ix].me_hash;
                v = h == hash ? key_eq(stored, key) : V_NO;
            }
            if (v != V_NO) {
                *value = v == V_YES ? entry_value(d, ix) : NULL;
                return v == V_YES && *value == NULL ? V_NO : v;
            }
        }
        perturb >>= DICT_PERTURB_SHIFT;
        i = (i * 5 + perturb + 1) & mask;
    }
}

verdict
mj_dict_get(PyObject *dict, PyObject *key, Py_hash_t hash, PyObject **value)
{
    PyDictObject *d = (PyDictObject *)dict;
    if (PyUnicode_CheckExact(key) && DK_IS_UNICODE(d->ma_keys)) {
        *value = _PyDict_GetItem_KnownHash(dict, key, hash);
        return *value != NULL ? V_YES : V_NO;
    }
    return probe(d, key, hash, value);
}

#if MJ_PY313
/* Objects of 3.13 keep their attributes' values in themselves, and the dict only refers to them;
 * the names are shared by all objects of the class. */
bool
mj_inline_attribute(PyObject *dict, PyObject *key, inline_attribute *found)
{
    PyDictObject *d = (PyDictObject *)dict;
    if (d->ma_values == NULL || !DK_IS_UNICODE(d->ma_keys) || !PyUnicode_CheckExact(key)) {
        return false;
    }
    found->keys = &d->ma_keys;
    found->values = &d->ma_values;
    found->names = &d->ma_keys->dk_nentries;
    found->value = NULL;
    for (Py_ssize_t i = 0; i < d->ma_keys->dk_nentries; i++) {
        PyObject *name = DK_UNICODE_ENTRIES(d->ma_keys)[i].me_key;
        if (name == key || (name != NULL && mj_value_eq(name, key) == V_YES)) {
            found->value = &d->ma_values->values[i];
        }
    }
    return true;
}
#endif

/* ---- order of keys ---- */

/* The order of an OrderedDict is in a linked list of its own (Objects/odictobject.c, the same
 * in 3.11 to 3.13); mj_value_init verifies the layout. */
typedef struct odict_node {
    PyObject *key;
    Py_hash_t hash;
    struct odict_node *next;
    struct odict_node *prev;
} odict_node;

typedef struct {
    PyDictObject dict;
    odict_node *first;
    odict_node *last;
    odict_node **fast_nodes;
    Py_ssize_t fast_nodes_size;
    void *resize_sentinel;
    size_t state;
} odict_object;

const void *
mj_odict_state(PyObject *dict)
{
    return odict_known && PyODict_Check(dict) ? &((odict_object *)dict)->state : NULL;
}

static bool
key_is(PyObject *stored, PyObject *expected)
{
    return stored == expected || mj_value_eq(expected, stored) == V_YES;
}

bool
mj_dict_keys_are(PyObject *dict, PyObject *keys)
{
    Py_ssize_t n = PyTuple_GET_SIZE(keys);
    if (PyDict_GET_SIZE(dict) != n) {
        return false;
    }
    if (PyODict_Check(dict)) {
        odict_node *node = odict_known ? ((odict_object *)dict)->first : NULL;
        for (Py_ssize_t i = 0; i < n; i++, node = node->next) {
            if (node == NULL || !key_is(node->key, PyTuple_GET_ITEM(keys, i))) {
                return false;
            }
        }
        return true;
    }
    Py_ssize_t pos = 0, i = 0;
    PyObject *key, *value;
    while (PyDict_Next(dict, &pos, &key, &value)) {
        if (i >= n || !key_is(key, PyTuple_GET_ITEM(keys, i))) {
            return false;
        }
        i++;
    }
    return i == n;
}

PyObject *
mj_dict_key_at(PyObject *dict, Py_ssize_t index)
{
    if (index >= PyDict_GET_SIZE(dict)) {
        return NULL;
    }
    if (PyODict_Check(dict)) {
        odict_node *node = odict_known ? ((odict_object *)dict)->first : NULL;
        for (; node != NULL && index > 0; index--) {
            node = node->next;
        }
        return node != NULL ? node->key : NULL;
    }
    Py_ssize_t pos = 0;
    PyObject *key, *value;
    while (PyDict_Next(dict, &pos, &key, &value)) {
        if (index-- == 0) {
            return key;
        }
    }
    return NULL;
}

/* ---- sets ---- */

bool
mj_set_is(PyObject *set, PyObject *expected)
{
    PySetObject *s = (PySetObject *)set;
    if (s->used != PyDict_GET_SIZE(expected)) {
        return false;
    }
    for (Py_ssize_t i = 0; i <= s->mask; i++) {
        setentry *entry = &s->table[i];
        if (entry->key == NULL || entry->hash == -1) { /* free or deleted */
            continue;
        }
        PyObject *found;
        if (mj_dict_get(expected, entry->key, entry->hash, &found) != V_YES ||
            mj_value_eq(found, entry->key) != V_YES) {
            return false;
        }
    }
    return true;
}

/* ---- initialisation ---- */

static void
find_range_fields(void)
{
    static const char *const names[3] = {"start", "stop", "step"};
    int found = 0;
    for (PyMemberDef *m = PyRange_Type.tp_members; m != NULL && m->name != NULL; m++) {
        for (int i = 0; i < 3; i++) {
            if (strcmp(m->name, names[i]) == 0) {
                range_fields[i] = m->offset;
                found++;
            }
        }
    }
    range_known = found == 3;
}

static bool
move_to_end(PyObject *od, PyObject *key)
{
    PyObject *result = PyObject_CallMethod(od, "move_to_end", "O", key);
    Py_XDECREF(result);
    return result != NULL;
}

/* Make an OrderedDict whose own order differs from that of the dict below it, and see that we read
 * the former. */
static int
verify_odict(void)
{
    PyObject *od = PyODict_New(), *key = PyUnicode_FromString("a"),
             *other = PyUnicode_FromString("b");
    int status = -1;
    if (od == NULL || key == NULL || other == NULL || PyODict_SetItem(od, key, Py_None) < 0 ||
        PyODict_SetItem(od, other, Py_None) < 0) {
        goto done;
    }
    odict_object *o = (odict_object *)od;
    bool large = (size_t)PyODict_Type.tp_basicsize >= sizeof(odict_object);
    size_t before = large ? o->state : 0;
    if (!move_to_end(od, key)) {
        goto done;
    }
    size_t between = large ? o->state : 0;
    odict_known = large && before != between && o->first != NULL && o->first->key == other &&
                  o->last != NULL && o->last->key == key && o->first->next == o->last &&
                  o->last->next == NULL;
    status = move_to_end(od, other) ? 0 : -1;
    odict_known =
        odict_known && o->state != between && o->first->key == key && o->last->key == other;
done:
    Py_XDECREF(other);
    Py_XDECREF(key);
    Py_XDECREF(od);
    return status;
}

int
mj_value_init(void)
{
    find_range_fields();
    return verify_odict();
}
