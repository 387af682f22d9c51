/* Chooses a macro-kernel from sizes: the cost model of waves (TSCompiler, section 6).
 *
 * The reference is magjit_triton/macro/waves.py; both do the same operations on doubles in the same
 * order, so that they agree to the last bit.  choose() allocates nothing: where a shape lies among the
 * measured points is computed once, and each candidate's residual is eight products.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define MOST_CANDIDATES 64
#define MOST_KNOTS 64
#define NUMBERS 16
#define LIBRARY (-1)
#define CORNERS 8
#define MOST_RESIDUAL 32.0
#define MOST_ELEMENTS (2147483648.0 - 131072.0)
#define N_MULTIPLE 16

typedef struct {
    double fixed, per_step;
} Affine;

typedef struct {
    int shift_m, shift_n, shift_k; /* tiles are powers of two */
    int64_t split_k, persistent, capacity;
    Affine lone, single, full, steady;
    double sum_fixed, sum_each;
} Candidate;

typedef struct {
    int count;
    double at[MOST_KNOTS];
} Knots;

typedef struct {
    PyObject_HEAD
    int64_t multiprocessors, products, itemsize, unit;
    double bandwidth;
    double between; /* of the library's time, at sizes of n and k that its table has not */
    int count;
    Candidate candidates[MOST_CANDIDATES];
    Knots knots[3];
    double *values;    /* NULL where the library was not measured */
    double *residuals; /* of each value those of all candidates; NULL where nobody has any */
} Selector;

typedef struct {
    int at[3];      /* the interval of each axis */
    double part[3]; /* where in it; below 0 and above 1 beyond the ends */
} Place;

typedef struct {
    Place where; /* in the library's table */
    const double *residuals[CORNERS]; /* at the points around it */
    double shares[CORNERS];
} Surroundings;

typedef struct {
    int64_t batch, m, n, k;
    double floor, sums; /* seconds that bytes take; elements of partial sums of one split */
} Shape;

static inline int64_t blocks(int64_t size, int shift) {
    return (size + ((int64_t)1 << shift) - 1) >> shift;
}

static inline double at(const Affine *one, double steps) {
    return one->fixed + one->per_step * steps;
}

static double wave(const Selector *self, const Candidate *one, double steps, int64_t tiles,
                   int64_t capacity) {
    int64_t processors = self->multiprocessors;
    double single = at(&one->single, steps);
    if (tiles <= processors) {
        if (processors == 1) return single;
        double lone = at(&one->lone, steps);
        return lone + (single - lone) * ((double)(tiles - 1) / (double)(processors - 1));
    }
    double full = at(&one->full, steps);
    double part = (double)(tiles - processors) / (double)(capacity - processors);
    return single + (full - single) * part;
}

static inline int64_t tiles_of(const Candidate *one, const Shape *shape) {
    return shape->batch * blocks(shape->m, one->shift_m) * blocks(shape->n, one->shift_n) *
           one->split_k;
}

static double seconds(const Selector *self, const Candidate *one, const Shape *shape) {
    int64_t tiles = tiles_of(one, shape);
    int64_t along = blocks(shape->k, one->shift_k);
    if (one->split_k > 1) along = (along + one->split_k - 1) / one->split_k;
    double steps = (double)along;
    double result;
    if (tiles <= one->capacity) {
        result = wave(self, one, steps, tiles, one->capacity);
    } else {
        /* Faster than a division of integers, and exact: both are below 2^51. */
        int64_t whole = (int64_t)((double)(tiles - 1) / (double)one->capacity);
        int64_t tail = tiles - whole * one->capacity;
        double full = at(&one->full, steps), steady = at(&one->steady, steps);
        double share = full > 0 ? wave(self, one, steps, tail, one->capacity) / full : 1.0;
        result = full + (double)(whole - 1) * steady + steady * share;
    }
    if (shape->floor > result) result = shape->floor;
    if (one->split_k > 1)
        result += one->sum_fixed + one->sum_each * (shape->sums * (double)one->split_k);
    return result;
}

static Shape shape_of(const Selector *self, int64_t batch, int64_t m, int64_t n, int64_t k) {
    double columns = (double)n * (double)self->products;
    double elements = (double)m * (double)k + columns * (double)k + (double)m * (double)n;
    double floor = (double)batch * elements * (double)self->itemsize / self->bandwidth;
    return (Shape){batch, m, n, k, floor, (double)batch * (double)m * columns};
}

static int place(const Knots *knots, double value, double *part) {
    if (knots->count == 1) {
        *part = 0.0;
        return 0;
    }
    int low = 0, high = knots->count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (value < knots->at[middle])
            high = middle;
        else
            low = middle + 1;
    }
    int found = low - 1;
    if (found > knots->count - 2) found = knots->count - 2;
    if (found < 0) found = 0;
    *part = (value - knots->at[found]) / (knots->at[found + 1] - knots->at[found]);
    return found;
}

static double along_k(const Selector *self, int row, int column, int l, double w) {
    int depth = self->knots[2].count;
    const double *value = self->values + ((size_t)row * self->knots[1].count + column) * depth + l;
    return depth == 1 ? value[0] : value[0] + (value[1] - value[0]) * w;
}

static double along_n(const Selector *self, int row, int j, double v, int l, double w) {
    double first = along_k(self, row, j, l, w);
    if (self->knots[1].count == 1) return first;
    return first + (along_k(self, row, j + 1, l, w) - first) * v;
}

static inline int on_knot(double part) { return part == 0.0 || part == 1.0; }

static double library_seconds(const Selector *self, const Place *where) {
    if (self->values == NULL) return INFINITY;
    int i = where->at[0], j = where->at[1], l = where->at[2];
    double u = where->part[0], v = where->part[1], w = where->part[2];
    double hedged = on_knot(v) && on_knot(w) ? 1.0 : self->between;
    double first = along_n(self, i, j, v, l, w);
    if (self->knots[0].count == 1) return hedged * exp2(first);
    return hedged * exp2(first + (along_n(self, i + 1, j, v, l, w) - first) * u);
}

static Surroundings surroundings_of(const Selector *self, const Shape *shape) {
    Surroundings around;
    if (self->values == NULL) return around;
    double sizes[3] = {(double)(shape->batch * shape->m), (double)shape->n, (double)shape->k};
    int next[3];
    double shares[3][2];
    for (int axis = 0; axis < 3; axis++) {
        double inside;
        around.where.at[axis] = place(&self->knots[axis], log2(sizes[axis]), &inside);
        around.where.part[axis] = inside;
        /* Beyond the ends a correction is what it is there. */
        inside = inside < 0.0 ? 0.0 : inside > 1.0 ? 1.0 : inside;
        shares[axis][0] = 1.0 - inside, shares[axis][1] = inside;
        next[axis] = self->knots[axis].count > 1;
    }
    if (self->residuals == NULL) return around;
    for (int corner = 0; corner < CORNERS; corner++) {
        int a = corner >> 2, b = corner >> 1 & 1, c = corner & 1;
        const int *at = around.where.at;
        size_t row = (size_t)(at[0] + a * next[0]);
        size_t column = row * self->knots[1].count + (at[1] + b * next[1]);
        size_t point = column * self->knots[2].count + (at[2] + c * next[2]);
        around.residuals[corner] = self->residuals + point * self->count;
        around.shares[corner] = shares[0][a] * shares[1][b] * shares[2][c];
    }
    return around;
}

static inline double corrected(const Selector *self, int number, const Shape *shape,
                               const Surroundings *around) {
    double told = seconds(self, &self->candidates[number], shape);
    if (self->residuals == NULL) return told;
    double residual = 0.0;
    for (int corner = 0; corner < CORNERS; corner++)
        residual += around->shares[corner] * around->residuals[corner][number];
    return told * exp2(residual);
}

static int fits(const Selector *self, int64_t batch, int64_t m, int64_t n, int64_t k) {
    if (batch <= 0 || m <= 0 || n <= 0 || k <= 0 || k % self->unit || n % N_MULTIPLE) return 0;
    double largest = (double)m * (double)k;
    double other = (double)n * (double)k;
    if (other > largest) largest = other;
    other = (double)m * (double)n;
    if (other > largest) largest = other;
    return largest * (double)batch < MOST_ELEMENTS;
}

static int choose(const Selector *self, int64_t batch, int64_t m, int64_t n, int64_t k,
                  int64_t *grid, double *least) {
    *grid = 0;
    *least = 0.0;
    if (!fits(self, batch, m, n, k)) return LIBRARY;
    Shape shape = shape_of(self, batch, m, n, k);
    Surroundings around = surroundings_of(self, &shape);
    int best = LIBRARY;
    *least = library_seconds(self, &around.where);
    for (int number = 0; number < self->count; number++) {
        double found = corrected(self, number, &shape, &around);
        if (found < *least) {
            *least = found;
            best = number;
        }
    }
    if (best != LIBRARY) {
        const Candidate *one = &self->candidates[best];
        *grid = tiles_of(one, &shape);
        if (one->persistent && *grid > one->capacity) *grid = one->capacity;
    }
    return best;
}

/* Python. */

static int read_doubles(PyObject *from, double *to, Py_ssize_t least, Py_ssize_t most,
                        Py_ssize_t *count, const char *what) {
    PyObject *fast = PySequence_Fast(from, "a sequence of numbers is wanted");
    if (fast == NULL) return -1;
    *count = PySequence_Fast_GET_SIZE(fast);
    if (*count < least || *count > most) {
        PyErr_Format(PyExc_ValueError, "%s: %zd numbers, not %zd to %zd", what, *count, least, most);
        Py_DECREF(fast);
        return -1;
    }
    for (Py_ssize_t i = 0; i < *count; i++) {
        to[i] = PyFloat_AsDouble(PySequence_Fast_GET_ITEM(fast, i));
        if (to[i] == -1.0 && PyErr_Occurred()) {
            Py_DECREF(fast);
            return -1;
        }
        if (!isfinite(to[i]) || fabs(to[i]) > 1e18) {
            PyErr_Format(PyExc_ValueError, "%s: number %zd is out of range", what, i);
            Py_DECREF(fast);
            return -1;
        }
    }
    Py_DECREF(fast);
    return 0;
}

static int read_power(double value, int *shift) {
    if (!(value >= 1 && value <= 65536)) return -1;
    *shift = 0;
    while (((int64_t)1 << *shift) < (int64_t)value) ++*shift;
    return (double)((int64_t)1 << *shift) == value ? 0 : -1;
}

static int read_candidate(const Selector *self, PyObject *from, Candidate *to) {
    double n[NUMBERS];
    Py_ssize_t count;
    if (read_doubles(from, n, NUMBERS, NUMBERS, &count, "a candidate") < 0) return -1;
    if (read_power(n[0], &to->shift_m) < 0 || read_power(n[1], &to->shift_n) < 0 ||
        read_power(n[2], &to->shift_k) < 0 || !(n[3] >= 1 && n[3] <= 64) ||
        !(n[5] >= 1 && n[5] <= 64)) {
        PyErr_SetString(PyExc_ValueError, "a candidate: tiles are powers of two, splits and "
                                          "occupancy at least 1");
        return -1;
    }
    to->split_k = (int64_t)n[3], to->persistent = (int64_t)n[4];
    to->capacity = self->multiprocessors * (int64_t)n[5];
    to->lone = (Affine){n[6], n[7]}, to->single = (Affine){n[8], n[9]};
    to->full = (Affine){n[10], n[11]}, to->steady = (Affine){n[12], n[13]};
    to->sum_fixed = n[14], to->sum_each = n[15];
    return 0;
}

static int read_library(Selector *self, PyObject *knots, PyObject *values) {
    if (values == Py_None) return 0;
    if (!PyTuple_Check(knots) || PyTuple_GET_SIZE(knots) != 3) {
        PyErr_SetString(PyExc_TypeError, "knots: a tuple of three sequences");
        return -1;
    }
    Py_ssize_t count, total = 1;
    for (int axis = 0; axis < 3; axis++) {
        Knots *one = &self->knots[axis];
        if (read_doubles(PyTuple_GET_ITEM(knots, axis), one->at, 1, MOST_KNOTS, &count, "knots") < 0)
            return -1;
        one->count = (int)count;
        total *= count;
        for (Py_ssize_t i = 1; i < count; i++) {
            if (!(one->at[i] > one->at[i - 1])) {
                PyErr_SetString(PyExc_ValueError, "knots rise");
                return -1;
            }
        }
    }
    self->values = PyMem_Calloc((size_t)total, sizeof(double));
    if (self->values == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return read_doubles(values, self->values, total, total, &count, "values");
}

/* After candidates and the library: beside each other lie those of a point, which are read at
 * once. */
static int read_residuals(Selector *self, PyObject *from) {
    PyObject *fast = PySequence_Fast(from, "residuals: a sequence");
    if (fast == NULL) return -1;
    Py_ssize_t total = self->values == NULL ? 0 : 1, count;
    for (int axis = 0; axis < 3; axis++) total *= self->knots[axis].count;
    double *one = PyMem_Calloc((size_t)total + 1, sizeof(double));
    int result = -1;
    if (one == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (PySequence_Fast_GET_SIZE(fast) != self->count) {
        PyErr_SetString(PyExc_ValueError, "residuals: of each candidate");
        goto done;
    }
    for (int i = 0; i < self->count; i++) {
        PyObject *given = PySequence_Fast_GET_ITEM(fast, i);
        Py_ssize_t length = PySequence_Size(given);
        if (length < 0) goto done;
        if (length == 0) continue;
        if (read_doubles(given, one, total, total, &count, "residuals") < 0) goto done;
        if (self->residuals == NULL)
            self->residuals = PyMem_Calloc((size_t)total * self->count, sizeof(double));
        if (self->residuals == NULL) {
            PyErr_NoMemory();
            goto done;
        }
        for (Py_ssize_t point = 0; point < total; point++) {
            if (fabs(one[point]) > MOST_RESIDUAL) {
                PyErr_SetString(PyExc_ValueError, "a residual is out of range");
                goto done;
            }
            self->residuals[point * self->count + i] = one[point];
        }
    }
    result = 0;
done:
    PyMem_Free(one);
    Py_DECREF(fast);
    return result;
}

static PyObject *selector_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"candidates", "knots",    "values",   "residuals", "multiprocessors",
                            "bandwidth",  "products", "itemsize", "unit",      "between", NULL};
    PyObject *candidates, *knots, *values, *residuals = NULL;
    long long multiprocessors = 0, products = 0, itemsize = 0, unit = 0;
    double bandwidth = 0.0, between = 1.0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO|O$LdLLLd", names, &candidates, &knots,
                                     &values, &residuals, &multiprocessors, &bandwidth, &products,
                                     &itemsize, &unit, &between))
        return NULL;
    if (multiprocessors < 1 || multiprocessors > 65536 || !(bandwidth > 0) || products < 1 ||
        itemsize < 1 || unit < 1) {
        PyErr_SetString(PyExc_ValueError, "a device has multiprocessors and bandwidth");
        return NULL;
    }
    if (!(between >= 0.0 && between <= 1.0)) {
        PyErr_SetString(PyExc_ValueError, "between: a share of the library's time");
        return NULL;
    }
    Selector *self = (Selector *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->between = between;
    self->multiprocessors = multiprocessors, self->bandwidth = bandwidth;
    self->products = products, self->itemsize = itemsize, self->unit = unit;
    PyObject *fast = PySequence_Fast(candidates, "candidates: a sequence");
    if (fast == NULL) goto failed;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(fast);
    if (count > MOST_CANDIDATES) {
        PyErr_Format(PyExc_ValueError, "%zd candidates, at most %d", count, MOST_CANDIDATES);
        Py_DECREF(fast);
        goto failed;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_candidate(self, PySequence_Fast_GET_ITEM(fast, i), &self->candidates[i]) < 0) {
            Py_DECREF(fast);
            goto failed;
        }
    }
    self->count = (int)count;
    Py_DECREF(fast);
    if (read_library(self, knots, values) < 0) goto failed;
    if (residuals != NULL && read_residuals(self, residuals) < 0) goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static void selector_dealloc(Selector *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->values);
    PyMem_Free(self->residuals);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static int read_sizes(PyObject *const *args, Py_ssize_t count, Py_ssize_t wanted, int64_t *sizes) {
    if (count != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", wanted, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < wanted; i++) {
        sizes[i] = PyLong_AsLongLong(args[i]);
        if (sizes[i] == -1 && PyErr_Occurred()) return -1;
        if (sizes[i] < 0 || sizes[i] > INT32_MAX) sizes[i] = 0; /* which nothing of ours computes */
    }
    return 0;
}

static PyObject *selector_choose(Selector *self, PyObject *const *args, Py_ssize_t count) {
    int64_t sizes[4], grid;
    double least;
    if (read_sizes(args, count, 4, sizes) < 0) return NULL;
    int best = choose(self, sizes[0], sizes[1], sizes[2], sizes[3], &grid, &least);
    return Py_BuildValue("(iLd)", best, (long long)grid, least);
}

static PyObject *selector_estimates(Selector *self, PyObject *const *args, Py_ssize_t count) {
    int64_t sizes[4];
    if (read_sizes(args, count, 4, sizes) < 0) return NULL;
    if (!fits(self, sizes[0], sizes[1], sizes[2], sizes[3])) {
        PyErr_SetString(PyExc_ValueError, "no kernel of ours computes these sizes");
        return NULL;
    }
    Shape shape = shape_of(self, sizes[0], sizes[1], sizes[2], sizes[3]);
    Surroundings around = surroundings_of(self, &shape);
    PyObject *result = PyTuple_New(self->count + 1);
    if (result == NULL) return NULL;
    for (int i = 0; i <= self->count; i++) {
        double found = i < self->count ? corrected(self, i, &shape, &around)
                                       : library_seconds(self, &around.where);
        PyObject *value = PyFloat_FromDouble(found);
        if (value == NULL) {
            Py_DECREF(result);
            return NULL;
        }
        PyTuple_SET_ITEM(result, i, value);
    }
    return result;
}

static PyObject *selector_benchmark(Selector *self, PyObject *const *args, Py_ssize_t count) {
    int64_t sizes[5];
    if (read_sizes(args, count, 5, sizes) < 0) return NULL;
    int64_t calls = sizes[4];
    if (calls < 1) {
        PyErr_SetString(PyExc_ValueError, "at least one call");
        return NULL;
    }
    struct timespec begin, end;
    volatile int64_t seen = 0;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int64_t i = 0; i < calls; i++) {
        int64_t grid;
        double least;
        /* Another m each time: nothing can be taken out of the loop. */
        seen += choose(self, sizes[0], sizes[1] + i % 61, sizes[2], sizes[3], &grid, &least);
        seen += grid;
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    double spent = (double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec);
    return PyFloat_FromDouble(spent / (double)calls);
}

static PyMethodDef selector_methods[] = {
    {"choose", (PyCFunction)(void (*)(void))selector_choose, METH_FASTCALL,
     "choose(batch, m, n, k) -> (index, programs, seconds); index -1 is the library's."},
    {"estimates", (PyCFunction)(void (*)(void))selector_estimates, METH_FASTCALL,
     "estimates(batch, m, n, k) -> seconds of each candidate, and of the library."},
    {"benchmark", (PyCFunction)(void (*)(void))selector_benchmark, METH_FASTCALL,
     "benchmark(batch, m, n, k, calls) -> nanoseconds of a choice, measured here."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot selector_slots[] = {
    {Py_tp_doc, "Chooses among candidates by the sizes of a product."},
    {Py_tp_new, selector_new},
    {Py_tp_dealloc, selector_dealloc},
    {Py_tp_methods, selector_methods},
    {0, NULL},
};

static PyType_Spec selector_spec = {
    .name = "magjit_triton._select.Selector",
    .basicsize = sizeof(Selector),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = selector_slots,
};

static int module_exec(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &selector_spec, NULL);
    if (type == NULL) return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    if (failed < 0) return -1;
    return PyModule_AddIntConstant(module, "MOST_CANDIDATES", MOST_CANDIDATES);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "magjit_triton._select",
    .m_doc = "The choice of a macro-kernel.",
    .m_size = 0,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__select(void) { return PyModuleDef_Init(&module); }
