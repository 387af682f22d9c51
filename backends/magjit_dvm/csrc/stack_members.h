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

} // namespace magjit_dvm

#endif
