/* Guard programs: conditions on the sizes of tensors.
 *
 *     condition := (push | binary | not | holds)+      for a stack of 64-bit integers
 *     push      := const n | size t d | stride t d | offset t
 *     binary    := add | sub | mul | floordiv | mod | min | max | eq | ne | lt | le | gt | ge
 *                | and | or
 *     holds     := the guard fails unless what is on the stack is not 0
 *
 * Arithmetic is Python's; what it cannot be, for a divisor 0 or a result of more than 64 bits,
 * fails the guard.  `t` counts the instruction's tensors.  Words are pairs (code, operand).
 */
#include "guard_ops.h"
#include "guard_torch.h"

enum { DEEPEST = 32, DIM_BITS = 8 };

typedef enum {
    S_CONST,
    S_SIZE,
    S_STRIDE,
    S_OFFSET,
    S_NOT,
    S_HOLDS,
    S_ADD, /* from here on: of two */
    S_SUB,
    S_MUL,
    S_FLOORDIV,
    S_MOD,
    S_MIN,
    S_MAX,
    S_EQ,
    S_NE,
    S_LT,
    S_LE,
    S_GT,
    S_GE,
    S_AND,
    S_OR,
    S_COUNT
} size_op;

static const char *const names[S_COUNT] = {
    "const", "size", "stride", "offset", "not", "holds", "add", "sub", "mul", "floordiv", "mod",
    "min",   "max",  "eq",     "ne",     "lt",  "le",    "gt",  "ge",  "and", "or",
};

/* ---- from tuples ---- */

static int
operand_of(PyObject *item, size_op op, Py_ssize_t n_tensors, int64_t *out)
{
    Py_ssize_t n = PyTuple_GET_SIZE(item), wanted = op < S_OFFSET ? (op == S_CONST ? 2 : 3) : 1;
    wanted = op == S_OFFSET ? 2 : wanted;
    *out = 0;
    if (n != wanted) {
        return -1;
    }
    int64_t values[2] = {0, 0};
    for (Py_ssize_t i = 1; i < n; i++) {
        PyObject *value = PyTuple_GET_ITEM(item, i);
        if (!PyLong_CheckExact(value)) {
            return -1;
        }
        values[i - 1] = PyLong_AsLongLong(value);
        if (values[i - 1] == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    if (n == 1 || op == S_CONST) {
        *out = values[0];
        return 0;
    }
    bool inside = values[0] >= 0 && values[0] < n_tensors && values[1] >= 0 &&
                  values[1] < (1 << DIM_BITS);
    *out = values[0] << DIM_BITS | values[1];
    return inside ? 0 : -1;
}

static int
code_of(PyObject *item)
{
    for (int op = 0; PyTuple_Check(item) && PyTuple_GET_SIZE(item) > 0 && op < S_COUNT; op++) {
        PyObject *name = PyTuple_GET_ITEM(item, 0);
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, names[op]) == 0) {
            return op;
        }
    }
    return -1;
}

PyObject *
mj_sizes_parse(PyObject *items, Py_ssize_t n_tensors)
{
    if (!PyTuple_CheckExact(items) || mj_torch_bind() == NULL) {
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(items);
    PyObject *made = PyBytes_FromStringAndSize(NULL, n * 2 * (Py_ssize_t)sizeof(int64_t));
    if (made == NULL) {
        return NULL;
    }
    int64_t *words = (int64_t *)PyBytes_AS_STRING(made);
    int depth = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i);
        int op = code_of(item);
        if (op < 0 || operand_of(item, (size_op)op, n_tensors, &words[2 * i + 1]) < 0) {
            Py_DECREF(made);
            return NULL;
        }
        words[2 * i] = op;
        int taken = op < S_NOT ? 0 : op < S_ADD ? 1 : 2, given = op != S_HOLDS;
        if (depth < taken || depth - taken + given > DEEPEST) {
            Py_DECREF(made);
            return NULL;
        }
        depth += given - taken;
    }
    if (depth != 0) {
        Py_CLEAR(made);
    }
    return made;
}

/* ---- evaluation ---- */

/* The tensor that was read last: conditions ask one after the other. */
typedef struct {
    PyObject *tensor;
    tensor_dims dims;
} last_read;

static bool
pushed(const guard_run *run, const slot_list *tensors, int64_t op, int64_t operand, last_read *last,
       int64_t *out)
{
    if (op == S_CONST) {
        *out = operand;
        return true;
    }
    PyObject *tensor = run->slots[tensors->slot[operand >> DIM_BITS]];
    if (tensor != last->tensor) {
        if (!mj_tensor_dims(tensor, &last->dims)) {
            return false;
        }
        last->tensor = tensor;
    }
    const tensor_dims *dims = &last->dims;
    if (op == S_OFFSET) {
        *out = dims->offset;
        return true;
    }
    int64_t dim = operand & ((1 << DIM_BITS) - 1);
    const int64_t *values = op == S_SIZE ? dims->sizes : dims->strides;
    if (dim >= dims->n || values == NULL) {
        return false;
    }
    *out = values[dim];
    return true;
}

static bool
divided(int64_t op, int64_t a, int64_t b, int64_t *out)
{
    if (b == 0 || (a == INT64_MIN && b == -1)) {
        return false;
    }
    int64_t quotient = a / b, rest = a % b;
    bool down = rest != 0 && (rest < 0) != (b < 0);
    *out = op == S_MOD ? rest + (down ? b : 0) : quotient - down;
    return true;
}

static bool
of_two(int64_t op, int64_t a, int64_t b, int64_t *out)
{
    switch (op) {
    case S_ADD:
        return !__builtin_add_overflow(a, b, out);
    case S_SUB:
        return !__builtin_sub_overflow(a, b, out);
    case S_MUL:
        return !__builtin_mul_overflow(a, b, out);
    case S_FLOORDIV:
    case S_MOD:
        return divided(op, a, b, out);
    case S_MIN:
        *out = a < b ? a : b;
        return true;
    case S_MAX:
        *out = a > b ? a : b;
        return true;
    case S_EQ:
        *out = a == b;
        return true;
    case S_NE:
        *out = a != b;
        return true;
    case S_LT:
        *out = a < b;
        return true;
    case S_LE:
        *out = a <= b;
        return true;
    case S_GT:
        *out = a > b;
        return true;
    case S_GE:
        *out = a >= b;
        return true;
    case S_AND:
        *out = a && b;
        return true;
    default:
        *out = a || b;
        return true;
    }
}

bool
mj_sizes_hold(const guard_run *run, const guard_instr *in)
{
    const int64_t *word = (const int64_t *)PyBytes_AS_STRING(in->obj);
    const int64_t *end = word + PyBytes_GET_SIZE(in->obj) / (Py_ssize_t)sizeof(int64_t);
    int64_t stack[DEEPEST], *top = stack; /* of which the parser has proved the depth */
    last_read last = {NULL};
    for (; word < end; word += 2) {
        if (word[0] < S_NOT) {
            if (!pushed(run, in->u.slots, word[0], word[1], &last, top++)) {
                return false;
            }
        }
        else if (word[0] == S_NOT) {
            top[-1] = !top[-1];
        }
        else if (word[0] == S_HOLDS) {
            if (*--top == 0) {
                return false;
            }
        }
        else {
            top--;
            if (!of_two(word[0], top[-1], top[0], &top[-1])) {
                return false;
            }
        }
    }
    return true;
}
