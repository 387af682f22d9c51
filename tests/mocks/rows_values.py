"""The table of values: recipes (tensors of the graph, outside objects) -> the result of a run."""

from __future__ import annotations

import array
import collections
import contextlib
import datetime
import decimal
import fractions
import functools
import itertools
import math
import operator
import pathlib
import random
import re
import sys
import types
import uuid
import weakref

import numpy as np
import torch

from tests.mocks import things

ROWS = {}


def row(make):
    """A recipe: (tensors of the graph, outside objects) -> the result of a run."""
    name = make.__name__.strip("_")
    assert name not in ROWS, name
    ROWS[name] = make
    return make


def rows(**makes):
    for name, make in makes.items():
        make.__name__ = name
        row(make)


rows(
    tensor=lambda t, e: t[0],
    none=lambda t, e: None,
    atoms=lambda t, e: [1, True, 2.5, -0.0, 1j, "s", b"b", ..., NotImplemented, range(3), None],
    odd_numbers=lambda t, e: [math.inf, -math.inf, math.nan, 1 << 200, -(1 << 64), 1e-320],
    long_text=lambda t, e: ["x" * 5000, b"y" * 5000, "'\"\n\\\x00é\ud800"],
    outside=lambda t, e: e[0],
    outside_twice=lambda t, e: (e[0], {"again": e[0], "other": e[1]}),
    flat_tuple=lambda t, e: (t[0], t[1]),
    tuple_backwards=lambda t, e: (t[1], t[0]),
    one_tuple=lambda t, e: (t[0],),
    same_tensor_twice=lambda t, e: [t[0], t[0], (t[0],)],
    constant_tuple=lambda t, e: ((1, "a", (2.0, None)), frozenset({1, 2})),
    list_of_tensors=lambda t, e: [t[0], [t[1], []], t[2]],
    tensor_dict=lambda t, e: {"a": t[0], "b": t[1]},
    odd_keys=lambda t, e: {1: t[0], (1, "a"): t[1], None: 0, 2.5: {}, frozenset({1}): ()},
    large_constant_list=lambda t, e: [list(range(300)), {i: str(i) for i in range(300)}],
    set_=lambda t, e: {1, "a", (1, 2)},
    empty_containers=lambda t, e: [[], {}, set(), frozenset(), (), collections.deque()],
    set_of_objects=lambda t, e: {things.ByValue(1), things.ByValue("x")},
    frozenset_of_objects=lambda t, e: frozenset({things.ByValue((1, 2)), 5}),
    ordered_dict=lambda t, e: collections.OrderedDict(b=t[0], a=1),
    default_dict=lambda t, e: collections.defaultdict(list, a=[t[0]]),
    default_dict_of_lambda=lambda t, e: collections.defaultdict(lambda: t[0], {1: 2}),
    counter=lambda t, e: collections.Counter("abca"),
    deque=lambda t, e: [collections.deque([t[0], 1]), collections.deque([1, 2, 3], maxlen=3)],
    chain_map=lambda t, e: collections.ChainMap({"a": t[0]}, {"b": 1}),
    user_dict=lambda t, e: collections.UserDict(a=t[0]),
    user_list=lambda t, e: collections.UserList([t[0], 1]),
    user_string=lambda t, e: collections.UserString("text"),
    mapping_proxy=lambda t, e: types.MappingProxyType({"a": t[0]}),
    namespace=lambda t, e: types.SimpleNamespace(a=t[0], b=[1]),
    named_tuple=lambda t, e: things.Point(t[0], [1]),
    collections_named_tuple=lambda t, e: OldPoint(t[0], 2),
    named_tuple_with_dict=lambda t, e: things.PointWithDict(t[0]),
    torch_size=lambda t, e: [t[0].shape, torch.Size([3, 4])],
    return_type=lambda t, e: torch.return_types.max((t[0], t[1])),
    struct_sequences=lambda t, e: [__import__("time").gmtime(0), sys.flags, sys.version_info],
    constant_slice=lambda t, e: [slice(None), slice(1, 5, 2)],
    slice_of_tensors=lambda t, e: slice(t[0], t[1], [1]),
    plain_object=lambda t, e: things.Plain(t[0], [1], None),
    bare_object=lambda t, e: [object(), things.Plain()],
    slots=lambda t, e: things.Slotted(t[0], [1]),
    inherited_slots=lambda t, e: things.SlottedChild(t[0], 2, [3]),
    slots_and_dict=lambda t, e: things.SlotsAndDict(t[0], t[1]),
    dataclass=lambda t, e: things.Data(t[0], c=[t[1]]),
    frozen_dataclass=lambda t, e: things.Frozen(t[0], {"k": 1}),
    frozen_slotted_dataclass=lambda t, e: things.FrozenSlots(t[0], t[1]),
    dataclass_with_init_var=lambda t, e: things.PostInit(t[0]),
    model_output=lambda t, e: things.Output(loss=t[0], logits=t[1], cache=(t[0],)),
    property_=lambda t, e: things.WithProperty(t[0]),
    generic=lambda t, e: things.Box(t[0]),
    metaclass=lambda t, e: things.Registered(t[0]),
    loud_list=lambda t, e: things.LoudList([t[0], 1]),
    loud_dict=lambda t, e: things.LoudDict(a=t[0]),
    loud_ordered_dict=lambda t, e: things.LoudOrdered(a=t[0]),
    loud_set=lambda t, e: things.LoudSet([1, 2]),
    tagged_containers=lambda t, e: [
        tagged(things.TaggedTuple((1, t[0])), t[1]),
        tagged(things.TaggedFrozenSet((1, 2)), t[1]),
        tagged(collections.Counter("ab"), t[1]),
    ],
    subclassed_atoms=lambda t, e: [
        tagged(things.Count(5), t[0]),
        things.Name("text"),
        things.Blob(b"blob"),
        sourced(things.Ratio(0.5), [t[0]]),
    ],
    classes_with_constructors=lambda t, e: [
        things.Offset(2, 3),
        things.Pair(t[0], 2),
        things.Task("name", max, t[0], [1]),
        things.Buffer(2, b"ab"),
        things.Options(t[0], [2]),
    ],
    enums=lambda t, e: [things.Color.RED, things.Mode.READ | things.Mode.WRITE],
    classes=lambda t, e: [int, things.Plain, things.Registered, torch.Tensor],
    modules=lambda t, e: [math, torch.nn],
    c_functions=lambda t, e: [len, math.sin, dict.get, dict.fromkeys, operator.itemgetter("a")],
    python_functions=lambda t, e: [torch.nn.functional.relu, functools.wraps],
    torch_constants=lambda t, e: (
        [torch.float32, torch.device("cpu"), torch.strided]
        + [torch.channels_last, torch.finfo(torch.float16)]
    ),
    typing_constants=lambda t, e: [list[int], int | None, __import__("typing").Optional[int]],
    numpy_scalars=lambda t, e: [np.float32(1.5), np.int64(3), np.dtype("float32"), np.sin, np.mean],
    numpy_array=lambda t, e: [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.ones((2, 3)))],
    regular_expression=lambda t, e: re.compile("a+"),
    dates=lambda t, e: [datetime.date(2020, 1, 2), datetime.timedelta(3), datetime.timezone.utc],
    decimals=lambda t, e: [decimal.Decimal("1.20"), fractions.Fraction(1, 3)],
    uuid=lambda t, e: uuid.UUID(int=5),
    path=lambda t, e: pathlib.PurePosixPath("/a/b"),
    byte_array=lambda t, e: bytearray(b"abc"),
    typed_array=lambda t, e: array.array("d", [1.0, 2.0]),
    random_generator=lambda t, e: random.Random(3),
    method=lambda t, e: things.Registered(t[0]).method,
    method_of_outside=lambda t, e: e[2].method,
    class_method=lambda t, e: things.Registered.make,
    c_method=lambda t, e: [[t[0]].append, {}.get, "abc".join, e[0].append],
    method_wrapper=lambda t, e: [things.Plain().__init__.__call__, [1].__len__],
    partial=lambda t, e: functools.partial(max, t[0], key=[1]),
    nested_partial=lambda t, e: nested_partial(t),
    partial_method=lambda t, e: functools.partialmethod(max, t[0]),
    item_getter=lambda t, e: contextlib.suppress(ValueError),
    weak_reference=lambda t, e: [e[2], weakref.ref(e[2])],
    weak_reference_to_new=lambda t, e: weakly(things.Plain(t[0])),
    weak_reference_with_label=lambda t, e: weakly(things.Plain(), things.Ref),
    weak_value_dict=lambda t, e: kept_weakly(weakref.WeakValueDictionary(), things.Plain()),
    weak_set=lambda t, e: weak_set(things.Plain(t[0])),
    exception=lambda t, e: ValueError("bad", t[0]),
    exception_fields=lambda t, e: [
        KeyError("k"),
        StopIteration(t[0]),
        ImportError("no", name="n", path="p"),
        OSError(2, "gone", "file"),
        UnicodeDecodeError("utf8", b"x", 0, 1, "why"),
        SystemExit(3),
        AttributeError("a", name="n", obj=[1]),
    ],
    user_exception=lambda t, e: things.ShapeError(t[0], ["hint"]),
    caused_exception=lambda t, e: caused(t),
    exception_group=lambda t, e: ExceptionGroup(
        "several", [ValueError(1), things.ShapeError(2, 3)]
    ),
    iterators=lambda t, e: [
        advanced(iter([1, t[0], 3])),
        advanced(iter((1, t[0]))),
        advanced(iter(range(5))),
        advanced(iter("abc")),
        advanced(reversed([1, 2, 3])),
        advanced(enumerate([t[0], 1])),
        advanced(zip([1, 2], (t[0], t[1]))),
        advanced(map(str, [1, 2])),
        advanced(filter(None, [1, 2])),
        advanced(itertools.count(4, 2)),
        advanced(itertools.islice(itertools.cycle([1, 2]), 5)),
        advanced(itertools.chain([1], [t[0]])),
        advanced(itertools.repeat(t[0], 4)),
        advanced(itertools.product("ab", "cd")),
    ],
    exhausted_iterator=lambda t, e: exhausted(iter([1])),
    iterators_over_dicts=lambda t, e: [
        advanced(iter({1: t[0], 2: 3})),
        advanced(iter({1: t[0], 2: t[1]}.values())),
        exhausted(iter({1: 2}.items())),
    ],
    iterator_of_outside=lambda t, e: iter(e[0]),
    dict_views=lambda t, e: [
        {"a": t[0]}.keys(),
        {"a": t[0]}.values(),
        e[1].items(),
        collections.OrderedDict(a=t[0]).values(),
    ],
    module=lambda t, e: things.Net(t[0]),
    module_container=lambda t, e: torch.nn.ModuleList([torch.nn.ReLU(), torch.nn.Dropout(0.5)]),
    packed_sequence=lambda t, e: torch.nn.utils.rnn.PackedSequence(t[0], t[1]),
    distribution=lambda t, e: torch.distributions.Normal(t[0], t[1], validate_args=False),
    tensor_with_attributes=lambda t, e: [tagged(t[0], [t[1]]), t[0]],
    parameter=lambda t, e: [e[3], {"weight": e[3]}],
    static_method=lambda t, e: [staticmethod(capturing(t[0])), classmethod(capturing(t[0]))],
    property_object=lambda t, e: property(capturing(t[0]), doc="text"),
)

OldPoint = collections.namedtuple("OldPoint", "x y")


def tagged(obj, tag):
    obj.tag = tag
    return obj


def sourced(obj, source):
    obj.source = source
    return obj


def nested_partial(t):
    inner = functools.partial(max, t[0])
    inner.note = "kept"
    return functools.partial(inner, t[1], **{"not a name": 1})


def weakly(obj, kind=weakref.ref):
    ref = kind(obj)
    if kind is not weakref.ref:
        ref.label = "label"
    return obj, ref, [ref]


def kept_weakly(mapping, obj):
    mapping["key"] = obj
    return obj, mapping


def weak_set(obj):
    found = weakref.WeakSet([obj])
    return obj, found


def caused(t):
    try:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise things.ShapeError(t[0], error) from error
    except things.ShapeError as error:
        error.add_note("a note")
        error.__traceback__ = None
        error.__cause__.__traceback__ = None
        return error


def advanced(iterator):
    next(iterator)
    return iterator


def exhausted(iterator):
    list(iterator)
    return iterator


def capturing(x):
    def inner(self=None):
        return x

    return inner


@row
def closure(t, e):
    seen = [t[0]]

    def inner(a, b=t[1], *, c=e[0]) -> int:
        """Documented."""
        return seen, inner, a, b, c

    inner.note = seen
    return inner


@row
def closures_that_share_a_cell(t, e):
    count = t[0]

    def get():
        return count

    def put(value):
        nonlocal count
        count = value

    return get, put


@row
def closure_with_an_empty_cell(t, e):
    def inner():
        return late

    if len(t) > 100:
        late = 1
    return inner


@row
def lambdas(t, e):
    return [lambda: t[0], lambda x, /, *y, z=2, **w: (x, y, z, w)]


@row
def wrapped_function(t, e):
    @functools.wraps(weakly)
    def inner():
        return t[0]

    return inner


@row
def cell(t, e):
    return [types.CellType(t[0]), types.CellType()]


@row
def self_referring_list(t, e):
    found = [t[0]]
    found.append(found)
    return found


@row
def list_and_tuple_cycle(t, e):
    inner = [t[0]]
    outer = (inner, 1)
    inner.append(outer)
    return outer


@row
def objects_in_a_ring(t, e):
    a, b = things.Plain(t[0]), things.Slotted(None, 1)
    a.other, b.x = b, a
    return {"a": a, "b": [b, a]}


@row
def ring_through_everything(t, e):
    d = {"t": t[0]}
    obj = things.Frozen(d, collections.deque([d]))
    d["obj"] = obj
    d["tuple"] = (obj, [d], frozenset({1}))
    d["function"] = lambda: d
    d["bound"] = things.Registered.method.__get__(obj)
    d["ordered"] = collections.OrderedDict(d=d)
    d["default"] = collections.defaultdict(None, d=d)
    d["partial"] = functools.partial(max, d)
    d["view"] = d.keys()
    return d


@row
def recursive_closure_in_a_dict(t, e):
    table = {}

    def visit(n):
        return table["visit"](n - 1), visit

    table["visit"] = visit
    return table


@row
def long_chain(t, e):
    node = None
    for _ in range(3000):
        node = things.Data(t[0], node)
    return node


@row
def deep_lists(t, e):
    found = [t[0]]
    for _ in range(3000):
        found = [found]
    return found


@row
def key_in_its_own_dict(t, e):
    owner = things.ByValue("owner")
    owner.table = {owner: 1}
    return owner


@row
def keys_hashed_by_their_parts(t, e):
    key = (things.ByValue((things.ByValue(1), "x")), 2)
    return {key: t[0], things.ByValue(key): {key}}


@row
def object_keys(t, e):
    key = things.Plain(t[0])
    return {key: 1, t[0]: key, e[2]: 2}


@row
def shared_parts(t, e):
    part = [t[0]]
    return {"a": part, "b": (part, part), "c": things.Plain(part, e[0])}


@row
def borrowed_namespace(t, e):
    a, b = things.Plain(t[0]), things.Plain()
    b.__dict__ = a.__dict__
    return [a, b, a.__dict__]


@row
def namespace_of_a_namespace(t, e):
    found = types.SimpleNamespace(a=t[0])
    return [found.__dict__, found, things.Plain().__dict__]


@row
def namespace_from_outside(t, e):
    found = things.Plain()
    found.__dict__ = e[1]
    return found


@row
def odd_attribute_names(t, e):
    found = things.Plain()
    found.__dict__.update({"not a name": 1, "class": 2, "été": 3, "a": t[0]})
    return found


@row
def parent_module_with_outside_child(t, e):
    net = things.Net(t[0])
    net.child = torch.nn.Sequential(torch.nn.ReLU(), net.inner)
    return net


@row
def numpy_view(t, e):
    base = np.arange(12.0)
    grid = base.reshape(3, 4)
    return [base, grid[1:, ::2], grid.T]


@row
def moved_ordered_dict(t, e):
    found = collections.OrderedDict(a=1, b=t[0], c=3)
    found.move_to_end("a")
    return found


@row
def context_manager(t, e):
    return contextlib.nullcontext(t[0])


def outside_objects():
    return [[1, 2], {"k": 1}, things.Registered(7), torch.nn.Parameter(torch.ones(1))]
