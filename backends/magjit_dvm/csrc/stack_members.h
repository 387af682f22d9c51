/* Members of a stack, on CPUs and on GPUs: each has an operator with a program, `self`, and its part of
 * the call's arguments, `args`, of which there are `n`. */
#ifndef MAGJIT_DVM_STACK_MEMBERS_H
#define MAGJIT_DVM_STACK_MEMBERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace magjit_dvm {

/* The members and their arguments; false with an exception where they are not what they should be. */
template <class Member, class Is>
bool read_members(PyObject *tuple, PyObject *const *args, Py_ssize_t nargs, Member *members,
                  Is is_operator)
{
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *object = PyTuple_GET_ITEM(tuple, i);
        if (!is_operator(object)) {
            PyErr_SetString(PyExc_TypeError, "a stack is made of fused operators of one kind");
            return false;
        }
        Member &member = members[i];
        member.self = (decltype(member.self))object;
        member.args = args + at;
        member.n = (Py_ssize_t)member.self->program->inputs.size();
        at += member.n;
    }
    if (at != nargs) {
        PyErr_SetString(PyExc_TypeError, "another number of arguments");
        return false;
    }
    return true;
}

/* One after another, each as if it had been called by itself: the results of all. */
template <class Member> PyObject *call_apart(const Member *members, Py_ssize_t n)
{
    PyObject *all = PyList_New(0);
    for (Py_ssize_t i = 0; all && i < n; i++) {
        const Member &member = members[i];
        PyObject *one =
            PyObject_Vectorcall((PyObject *)member.self, member.args, (size_t)member.n, nullptr);
        int failed = one ? 0 : -1;
        if (one && PyTuple_Check(one)) { /* of several, or of none */
            failed = PyList_SetSlice(all, PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, one);
        } else if (one) {
            failed = PyList_Append(all, one);
        }
        Py_XDECREF(one);
        if (failed) {
            Py_CLEAR(all);
        }
    }
    PyObject *tuple = all ? PyList_AsTuple(all) : nullptr;
    Py_XDECREF(all);
    return tuple;
}

} // namespace magjit_dvm

#endif
