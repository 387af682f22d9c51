/* A program as Python lists it, read and checked. */
#include "module.h"

#include <algorithm>

namespace magjit_dvm {

namespace {

bool read_dims(PyObject *tuple, int8_t *dims, int8_t *ndim, int lowest, int rank)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) > MAX_DIMS) {
        PyErr_SetString(PyExc_ValueError, "dimensions are a tuple of at most 8 ints");
        return false;
    }
    *ndim = (int8_t)PyTuple_GET_SIZE(tuple);
    for (int k = 0; k < *ndim; k++) {
        long d = PyLong_AsLong(PyTuple_GET_ITEM(tuple, k));
        if (PyErr_Occurred()) {
            return false;
        }
        if (d < lowest || d >= rank) {
            PyErr_Format(PyExc_ValueError, "dimension %ld is out of range", d);
            return false;
        }
        dims[k] = (int8_t)d;
    }
    return true;
}

} // namespace

int read_program(Program &program, PyObject *inputs, PyObject *nodes, PyObject *outputs)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); i++) {
        Input in{};
        int kind, dtype;
        PyObject *dims;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(inputs, i), "iiO:input", &kind, &dtype, &dims) ||
            !read_dims(dims, in.dims, &in.ndim, DIM_indexed, program.rank)) {
            return -1;
        }
        if (kind < 0 || kind > INPUT_float || dtype < 0 || dtype >= N_DTYPES) {
            PyErr_SetString(PyExc_ValueError, "an input of an unknown kind or dtype");
            return -1;
        }
        in.kind = (InputKind)kind;
        in.dtype = (DType)dtype;
        program.inputs.push_back(in);
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); i++) {
        Node node{};
        int kind, dtype, op, a, b, c, aux, mask;
        long long integer;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(nodes, i), "iiiiiiiidL:node", &kind, &dtype, &op, &a,
                              &b, &c, &aux, &mask, &node.number, &integer)) {
            return -1;
        }
        if (kind < 0 || kind >= N_NODE_KINDS || dtype < 0 || dtype >= N_DTYPES || op < 0 ||
            op >= N_OPS || aux < -1 || aux > 1 << 14 || std::max({a, b, c}) >= MAX_NODES ||
            std::min({a, b, c}) < -1) {
            PyErr_SetString(PyExc_ValueError,
                            "a node of an unknown kind, dtype, instruction or operand");
            return -1;
        }
        node.kind = (NodeKind)kind;
        node.dtype = (DType)dtype;
        node.op = (uint16_t)op;
        node.args[0] = (int16_t)a;
        node.args[1] = (int16_t)b;
        node.args[2] = (int16_t)c;
        node.aux = (int16_t)aux;
        node.mask = (uint32_t)mask;
        node.integer = integer;
        program.nodes.push_back(node);
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs); i++) {
        Output out{};
        int node, into, along, part, parts, whole, total, offset;
        int8_t n_order;
        PyObject *dims, *order;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(outputs, i), "iOOiiiiiii:output", &node, &dims,
                              &order, &into, &along, &part, &parts, &whole, &total, &offset)) {
            return -1;
        }
        if (into < -1 || into >= MAX_OUTPUTS || along < -1 || along >= MAX_DIMS || part < 0 ||
            part >= parts || parts > MAX_OUTPUTS || std::min({whole, total, offset}) < -1 ||
            std::max({whole, total, offset}) >= MAX_INPUTS) {
            PyErr_SetString(PyExc_ValueError, "an output that is no part of a whole");
            return -1;
        }
        if (node < 0 || node >= MAX_NODES) {
            PyErr_SetString(PyExc_ValueError, "an output of a node that is not there");
            return -1;
        }
        if (!read_dims(dims, out.dims, &out.ndim, DIM_one, program.rank) ||
            !read_dims(order, out.order, &n_order, 0, out.ndim)) {
            return -1;
        }
        if (n_order != out.ndim) {
            PyErr_SetString(PyExc_ValueError, "the order of an output names each dimension once");
            return -1;
        }
        out.node = (int16_t)node;
        out.into = (int16_t)into;
        out.along = (int8_t)along;
        out.part = (int16_t)part;
        out.parts = (int16_t)parts;
        out.whole = (int16_t)whole;
        out.total = (int16_t)total;
        out.offset = (int16_t)offset;
        program.outputs.push_back(out);
    }
    std::string error = program.verify();
    if (!error.empty()) {
        PyErr_SetString(PyExc_ValueError, error.c_str());
        return -1;
    }
    return 0;
}

} // namespace magjit_dvm
