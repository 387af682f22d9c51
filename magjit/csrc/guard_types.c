/* Guards on class attributes: what a look-up in the class and its bases finds is unchanged.
 *
 * A type's version tag is unique and changes with every change of the type or of one of its bases,
 * so one compare answers for all names; the look-ups are made again only when the tag is another
 * one.
 */
#include "guard.h"

struct type_names {
    uint32_t version; /* of the type for which all names last held; 0: none */
    Py_ssize_t n;
    struct {
        PyObject *name;
        PyObject *expected; /* NULL: not found */
    } item[];
};

uint32_t
mj_type_version(PyTypeObject *type)
{
#if !MJ_PY313
    if (!(type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG)) {
        return 0;
    }
#endif
    return (uint32_t)type->tp_version_tag;
}

type_names *
mj_type_names_new(PyObject *pairs)
{
    if (!PyTuple_Check(pairs)) {
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(pairs);
    type_names *names = PyMem_Calloc(1, sizeof(type_names) + (size_t)n * sizeof(names->item[0]));
    if (names == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *pair = PyTuple_GET_ITEM(pairs, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 ||
            !PyUnicode_CheckExact(PyTuple_GET_ITEM(pair, 0))) {
            mj_type_names_free(names);
            return NULL;
        }
        PyObject *expected = PyTuple_GET_ITEM(pair, 1);
        PyObject *name = Py_NewRef(PyTuple_GET_ITEM(pair, 0));
        PyUnicode_InternInPlace(&name); /* the type cache of the interpreter is by pointer */
        names->item[i].name = name;
        names->item[i].expected = expected == mj_null ? NULL : Py_NewRef(expected);
        names->n = i + 1;
    }
    return names;
}

void
mj_type_names_free(type_names *names)
{
    for (Py_ssize_t i = 0; names != NULL && i < names->n; i++) {
        Py_XDECREF(names->item[i].name);
        Py_XDECREF(names->item[i].expected);
    }
    PyMem_Free(names);
}

int
mj_type_names_traverse(type_names *names, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; names != NULL && i < names->n; i++) {
        Py_VISIT(names->item[i].name);
        Py_VISIT(names->item[i].expected);
    }
    return 0;
}

bool
mj_type_names_check(type_names *names, PyTypeObject *type)
{
    uint32_t version = mj_type_version(type);
    if (version != 0 && version == names->version) {
        return true;
    }
    for (Py_ssize_t i = 0; i < names->n; i++) {
        if (_PyType_Lookup(type, names->item[i].name) != names->item[i].expected) {
            return false;
        }
    }
    names->version = mj_type_version(type);
    return true;
}
