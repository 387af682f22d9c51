/* Views of tensors: several operators that move no data are one call, whose strides are computed here.
 *
 * What it makes shares memory with its tensor, as a view does, but is none of autograd's: it is for
 * what nobody outside of a schedule gets (view_chains.py). */
#include "module.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "torch_abi.h"

namespace magjit_dvm {

namespace {

enum : int { MOST_DIMS = 16 };
enum Operator : int64_t { VIEW, PERMUTE, EXPAND, UNSQUEEZE, SQUEEZE, SELECT, SLICE, N_OPERATORS };

/* As in view_chains.py: what a call gives, instead of a number that is always the same. */
constexpr int64_t GIVEN = (int64_t)1 << 61;

struct Step {
    Operator op;
    std::vector<int64_t> numbers;
};

struct Views {
    PyObject_HEAD
    vectorcallfunc call;
    std::vector<Step> *steps;
    Py_ssize_t n_given;
    PyObject *by_torch; /* called with the same arguments where this does not know */
};

/* Where elements lie, from the tensor's first one on. */
struct Place {
    int64_t ndim, sizes[MOST_DIMS], strides[MOST_DIMS], offset;
};

/* Sizes of a view as asked for, one of which may be −1. */
bool infer_sizes(const Place &from, int64_t *sizes, int64_t n)
{
    int64_t whole = 1, known = 1, open = -1;
    for (int64_t d = 0; d < from.ndim; d++) {
        whole *= from.sizes[d];
    }
    for (int64_t d = 0; d < n; d++) {
        if (sizes[d] == -1 && open < 0) {
            open = d;
        } else if (sizes[d] <= 0 || __builtin_mul_overflow(known, sizes[d], &known)) {
            return false;
        }
    }
    if (whole < 1) {
        return false; /* of no elements: torch has rules of its own */
    }
    if (open >= 0) {
        sizes[open] = whole / known;
        known *= sizes[open];
    }
    return known == whole;
}

/* Dimensions that lie side by side in memory are one, and each is divided anew. */
bool view_as(Place &place, const int64_t *sizes, int64_t n)
{
    int64_t strides[MOST_DIMS], at = n - 1;
    int64_t run = 1, inner = place.ndim ? place.strides[place.ndim - 1] : 1; /* of what is side by side */
    for (int64_t d = place.ndim - 1; d >= 0; d--) {
        run *= place.sizes[d];
        bool ends = d == 0 || (place.sizes[d - 1] != 1 && place.strides[d - 1] != run * inner);
        if (!ends) {
            continue;
        }
        int64_t part = 1;
        while (at >= 0 && (part < run || sizes[at] == 1)) {
            strides[at] = part * inner;
            part *= sizes[at--];
        }
        if (part != run) {
            return false;
        }
        if (d > 0) {
            inner = place.strides[d - 1];
            run = 1;
        }
    }
    if (place.ndim == 0) {
        std::fill(strides, strides + n, 1);
        at = -1;
    }
    std::copy(sizes, sizes + n, place.sizes);
    std::copy(strides, strides + n, place.strides);
    place.ndim = n;
    return at < 0;
}

void permute(Place &place, const int64_t *dims)
{
    Place from = place;
    for (int64_t d = 0; d < from.ndim; d++) {
        place.sizes[d] = from.sizes[dims[d]];
        place.strides[d] = from.strides[dims[d]];
    }
}

bool expand(Place &place, const int64_t *sizes, int64_t n)
{
    Place from = place;
    int64_t more = n - from.ndim;
    if (more < 0) {
        return false;
    }
    for (int64_t d = n - 1; d >= 0; d--) {
        bool fresh = d < more;
        int64_t size = fresh ? 1 : from.sizes[d - more];
        int64_t wanted = sizes[d] == -1 && !fresh ? size : sizes[d];
        if (wanted < 0 || (size != 1 && wanted != size)) {
            return false;
        }
        int64_t further = d + 1 < n ? place.sizes[d + 1] * place.strides[d + 1] : 1;
        int64_t stride = fresh ? further : from.strides[d - more];
        place.sizes[d] = wanted;
        place.strides[d] = wanted == size ? stride : 0;
    }
    place.ndim = n;
    return true;
}

void remove_dim(Place &place, int64_t dim)
{
    std::copy(place.sizes + dim + 1, place.sizes + place.ndim, place.sizes + dim);
    std::copy(place.strides + dim + 1, place.strides + place.ndim, place.strides + dim);
    place.ndim--;
}

void insert_dim(Place &place, int64_t dim)
{
    int64_t stride = dim < place.ndim ? place.sizes[dim] * place.strides[dim] : 1;
    std::copy_backward(place.sizes + dim, place.sizes + place.ndim, place.sizes + place.ndim + 1);
    std::copy_backward(place.strides + dim, place.strides + place.ndim,
                       place.strides + place.ndim + 1);
    place.sizes[dim] = 1;
    place.strides[dim] = stride;
    place.ndim++;
}

bool select(Place &place, int64_t dim, int64_t index)
{
    int64_t size = place.sizes[dim];
    if (index < -size || index >= size) {
        return false;
    }
    place.offset += (index < 0 ? index + size : index) * place.strides[dim];
    remove_dim(place, dim);
    return true;
}

bool slice(Place &place, int64_t dim, int64_t first, int64_t last, int64_t step)
{
    int64_t size = place.sizes[dim];
    first = std::clamp<int64_t>(first < 0 ? first + size : first, 0, size);
    last = std::clamp<int64_t>(last < 0 ? last + size : last, first, size);
    if (step < 1 || step >= GIVEN) {
        return false;
    }
    place.offset += first * place.strides[dim];
    place.sizes[dim] = (last - first + step - 1) / step;
    place.strides[dim] *= step;
    return true;
}

/* Whether an operator's dimensions are dimensions of what it gets. */
bool has_dims(const Place &place, Operator op, const int64_t *numbers, int64_t n)
{
    switch (op) {
    case VIEW:
    case EXPAND:
        return n <= MOST_DIMS;
    case PERMUTE:
        return n == place.ndim;
    case UNSQUEEZE:
        return place.ndim < MOST_DIMS && numbers[0] <= place.ndim;
    default:
        return numbers[0] < place.ndim;
    }
}

/* One operator; false where torch is to say what it gives. */
bool apply(Place &place, Operator op, int64_t *numbers, int64_t n)
{
    if (!has_dims(place, op, numbers, n)) {
        return false;
    }
    switch (op) {
    case VIEW:
        return infer_sizes(place, numbers, n) && view_as(place, numbers, n);
    case PERMUTE:
        permute(place, numbers);
        return true;
    case EXPAND:
        return expand(place, numbers, n);
    case UNSQUEEZE:
        insert_dim(place, numbers[0]);
        return true;
    case SQUEEZE:
        if (place.sizes[numbers[0]] == 1) {
            remove_dim(place, numbers[0]);
        }
        return true;
    case SELECT:
        return select(place, numbers[0], numbers[1]);
    default:
        return slice(place, numbers[0], numbers[1], numbers[2], numbers[3]);
    }
}

/* All operators, with the numbers of a call; false, with nothing raised, where torch is to do it. */
bool apply_all(const Views *self, PyObject *const *given, Place &place)
{
    for (const Step &step : *self->steps) {
        int64_t numbers[MOST_DIMS], n = (int64_t)step.numbers.size();
        for (int64_t k = 0; k < n; k++) {
            int64_t number = step.numbers[k];
            if (number >= GIVEN) {
                PyObject *object = given[number - GIVEN];
                int overflow = 0;
                if (!PyLong_Check(object)) {
                    return false;
                }
                number = PyLong_AsLongLongAndOverflow(object, &overflow);
                if (overflow || number <= -GIVEN || number >= GIVEN) {
                    return false;
                }
            }
            numbers[k] = number;
        }
        if (!apply(place, step.op, numbers, n)) {
            return false;
        }
    }
    return true;
}

bool place_of(PyObject *tensor, Place &place)
{
    const TorchLibrary &lib = torch_library;
    int32_t layout;
    int64_t *sizes, *strides;
    if (!lib.reinterpret || !is_plain_tensor(tensor)) {
        return false;
    }
    void *handle = tensor_handle(tensor);
    if (lib.get_layout(handle, &layout) || layout != lib.strided ||
        lib.get_dim(handle, &place.ndim) || place.ndim > MOST_DIMS ||
        lib.get_sizes(handle, &sizes) || lib.get_strides(handle, &strides)) {
        return false;
    }
    std::copy(sizes, sizes + place.ndim, place.sizes);
    std::copy(strides, strides + place.ndim, place.strides);
    place.offset = 0;
    return true;
}

PyObject *views_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *keywords)
{
    Views *self = (Views *)object;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    Place place;
    bool known = !keywords && n == 1 + self->n_given && place_of(args[0], place) &&
                 apply_all(self, args + 1, place);
    void *made = nullptr;
    if (!known || torch_library.reinterpret(tensor_handle(args[0]), place.ndim, place.sizes,
                                            place.strides, place.offset, &made)) {
        return PyObject_Vectorcall(self->by_torch, args, nargsf, keywords);
    }
    return wrapped(made);
}

/* ---- making one ---- */

/* Numbers that each operator has; −1: as many as it has dimensions. */
constexpr int64_t N_NUMBERS[N_OPERATORS] = {-1, -1, -1, 1, 1, 2, 4};

int read_step(PyObject *item, Step &step, Py_ssize_t n_given)
{
    PyObject *numbers;
    int op;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "an operator is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "iO!:operator", &op, &PyTuple_Type, &numbers)) {
        return -1;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(numbers);
    bool right = op >= 0 && op < N_OPERATORS && n <= MOST_DIMS &&
                 (N_NUMBERS[op] < 0 || n == N_NUMBERS[op]);
    for (Py_ssize_t k = 0; right && k < n; k++) {
        long long number = PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, k));
        if (PyErr_Occurred()) {
            return -1;
        }
        right = number > -GIVEN && number < GIVEN + n_given;
        step.numbers.push_back(number);
    }
    if (right && op != VIEW && op != EXPAND && n) { /* the first numbers are dimensions */
        bool permutes = op == PERMUTE;
        std::vector<bool> seen(MOST_DIMS, false);
        for (Py_ssize_t k = 0; right && k < (permutes ? n : 1); k++) {
            int64_t dim = step.numbers[k];
            right = dim >= 0 && dim < (permutes ? n : MOST_DIMS) && !(permutes && seen[dim]);
            if (right) {
                seen[dim] = true;
            }
        }
    }
    if (!right) {
        PyErr_SetString(PyExc_ValueError, "an operator with other numbers than it has");
        return -1;
    }
    step.op = (Operator)op;
    return 0;
}

PyObject *views_new(PyTypeObject *type, PyObject *args, PyObject *)
{
    PyObject *items, *by_torch;
    Py_ssize_t n_given;
    if (!PyArg_ParseTuple(args, "O!nO:Views", &PyTuple_Type, &items, &n_given, &by_torch)) {
        return nullptr;
    }
    if (n_given < 0) {
        PyErr_SetString(PyExc_ValueError, "fewer than no numbers");
        return nullptr;
    }
    auto steps = std::make_unique<std::vector<Step>>((size_t)PyTuple_GET_SIZE(items));
    for (size_t k = 0; k < steps->size(); k++) {
        if (read_step(PyTuple_GET_ITEM(items, (Py_ssize_t)k), (*steps)[k], n_given)) {
            return nullptr;
        }
    }
    Views *self = (Views *)type->tp_alloc(type, 0);
    if (!self) {
        return nullptr;
    }
    self->call = views_call;
    self->steps = steps.release();
    self->n_given = n_given;
    self->by_torch = Py_NewRef(by_torch);
    return (PyObject *)self;
}

int views_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((Views *)object)->by_torch);
    Py_VISIT(Py_TYPE(object));
    return 0;
}

int views_clear(PyObject *object)
{
    Py_CLEAR(((Views *)object)->by_torch);
    return 0;
}

void views_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    views_clear(object);
    delete ((Views *)object)->steps;
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyMemberDef views_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Views, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot views_slots[] = {{Py_tp_new, (void *)views_new},
                             {Py_tp_dealloc, (void *)views_dealloc},
                             {Py_tp_traverse, (void *)views_traverse},
                             {Py_tp_clear, (void *)views_clear},
                             {Py_tp_call, (void *)PyVectorcall_Call},
                             {Py_tp_members, views_members},
                             {0, nullptr}};

PyType_Spec views_spec = {"magjit_dvm._vm.Views", sizeof(Views), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC,
                          views_slots};

} // namespace

int add_views(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &views_spec, nullptr);
    int failed = type ? PyModule_AddObjectRef(module, "Views", type) : -1;
    Py_XDECREF(type);
    return failed;
}

} // namespace magjit_dvm
