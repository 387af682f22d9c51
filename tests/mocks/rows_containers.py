"""Containers changed by C code, tensors, and calls."""

from __future__ import annotations

import array
import collections
import types

import numpy as np
import torch

from magjit.mocks import Call, ContainerState, ListState, TensorAttrWrite
from tests.mocks import things
from tests.mocks.effects import (
    abc,
    changed,
    objects,
    ordered,
    plain,
    row,
    set_attr,
    set_item,
    t_key,
    three,
)


@row(three)
def list_append(t, log, items):
    with changed(log, items):
        items.append(t[0])


@row(objects)
def list_append_to_unknown_objects(t, log, items):
    with changed(log, items):
        items.append([t[0]])


@row(three)
def list_extend(t, log, items):
    with changed(log, items):
        items.extend([t[0], [t[1]]])


@row(lambda: [1, 2, 3, 4, 5, 6], again=False)
def list_pop(t, log, items):
    with changed(log, items):
        items.pop()


@row(objects, again=False)
def list_pop_front(t, log, items):
    with changed(log, items):
        return items.pop(0)


@row(objects)
def list_insert(t, log, items):
    with changed(log, items):
        items.insert(1, t[0])


@row(objects)
def list_reverse(t, log, items):
    with changed(log, items):
        items.reverse()


@row(lambda: [3, 1, 2])
def list_sort(t, log, items):
    with changed(log, items):
        items.sort()


@row(three, again=False)
def list_clear(t, log, items):
    with changed(log, items):
        items.clear()


@row(lambda: [1, 2, 3, 4], again=False)
def list_slice_deleted_in_the_middle(t, log, items):
    with changed(log, items):
        del items[1:3]


@row(objects)
def list_slice_replaced(t, log, items):
    with changed(log, items):
        items[1:] = [t[0], items[0], items]


@row(objects)
def list_unchanged_in_the_end(t, log, items):
    with changed(log, items):
        items.append(1)
        items.pop()


@row(three)
def item_writes_before_and_after_c_code(t, log, items):
    set_item(log, items, 0, t[0])
    with changed(log, items):
        items.append(t[1])
    set_item(log, items, 1, t[2])
    log[-2] = ListState(items, [1, 2, 3], list(items))


@row(lambda: things.LoudList([1]))
def append_to_a_list_subclass(t, log, items):
    with changed(log, items):
        list.append(items, t[0])
        list.extend(items, (1, 2))


@row(abc)
def dict_update(t, log, d):
    with changed(log, d):
        d.update(z=t[0], a=t[1])


@row(abc, again=False)
def dict_pop_and_clear(t, log, d):
    with changed(log, d):
        d.clear()
        d["c"] = 3


@row(abc)
def dict_key_moved(t, log, d):
    with changed(log, d):
        d["b"] = d.pop("b")


@row(lambda: {"a": [1], "b": things.Plain(2), 3: t_key})
def dict_rotated_with_unknown_values(t, log, d):
    with changed(log, d):
        for key in list(d)[:2]:
            d[key] = d.pop(key)


@row(ordered)
def ordered_dict_move_to_end(t, log, d):
    with changed(log, d):
        d.move_to_end("a")
        d.move_to_end("c", last=False)


@row(lambda: things.LoudOrdered(a=1, b=2))
def update_of_an_ordered_dict_subclass(t, log, d):
    with changed(log, d):
        collections.OrderedDict.__setitem__(d, "z", t[0])
        collections.OrderedDict.move_to_end(d, "a")


@row(lambda: collections.Counter("ab"))
def counter(t, log, counts):
    with changed(log, counts):
        counts.update({"c": 5})


@row(lambda: collections.defaultdict(list))
def default_dict(t, log, d):
    with changed(log, d):
        d["k"] = [t[0]]


@row(lambda: {1, 2, 3})
def set_changes(t, log, items):
    with changed(log, items):
        items.discard(1)
        items.update({7, (8, "a")})


@row(set)
def set_of_tensors(t, log, items):
    with changed(log, items):
        items.add(t[0])


@row(lambda: things.LoudSet([1, 2]))
def set_subclass(t, log, items):
    with changed(log, items):
        set.add(items, 5)
        set.discard(items, 1)


@row(lambda: collections.deque([1, 2]))
def deque_append(t, log, items):
    with changed(log, items):
        items.append(t[0])


@row(lambda: collections.deque([things.Plain(), 2], maxlen=2))
def full_deque_append(t, log, items):
    with changed(log, items):
        items.append(t[0])


@row(lambda: collections.deque([things.Plain(1), things.Plain(2), 3], maxlen=5))
def deque_rotate(t, log, items):
    with changed(log, items):
        items.rotate(1)


@row(lambda: collections.deque([1, 2, 3]), again=False)
def deque_popleft(t, log, items):
    with changed(log, items):
        items.popleft()


@row(lambda: collections.deque([1, 2, 3], 3), again=False)
def deque_appendleft(t, log, items):
    with changed(log, items):
        items.appendleft(t[0])


@row(lambda: collections.deque([1, 2, 3]), again=False)
def deque_clear(t, log, items):
    with changed(log, items):
        items.clear()


@row(lambda: bytearray(b"abc"))
def byte_array(t, log, data):
    with changed(log, data):
        data[0] = 120
        data.append(1)


@row(lambda: array.array("d", [1.0, 2.0]))
def typed_array(t, log, data):
    initial = data[:]
    data[1] = 5.0
    data.append(6.0)
    log.append(ContainerState(data, initial, data[:]))


@row(lambda: np.zeros((2, 3)))
def numpy_array(t, log, data):
    initial = data.copy()
    data[1] = 5.0
    log.append(ContainerState(data, initial, data.copy()))


@row(lambda: torch.nn.Parameter(torch.ones(2)))
def gradient(t, log, parameter):
    grad = torch.ones(2)
    t.append(grad)
    log.append(TensorAttrWrite(parameter, "grad", grad))
    parameter.grad = grad


@row(lambda: torch.ones(2))
def requires_grad(t, log, tensor):
    log.append(TensorAttrWrite(tensor, "requires_grad", True))
    tensor.requires_grad = True


@row()
def attribute_of_a_new_tensor(t, log):
    log.append(TensorAttrWrite(t[0], "requires_grad", True))
    t[0].requires_grad = True
    return t[0]


@row(list)
def call_with_new_values(t, log, items):
    log.append(Call(list.append, (items, {"t": t[0]})))
    items.append({"t": t[0]})


@row(lambda: types.SimpleNamespace(log=[]))
def calls_in_order(t, log, found):
    for i in range(3):
        log.append(Call(note, (found,), {"what": i}))
        note(found, what=i)
    set_attr(log, found, "last", t[0])


def note(found, what):
    found.__dict__.setdefault("log", []).append(what)


@row(plain)
def result_and_effect_share(t, log, obj):
    output = things.Output(loss=t[0], logits=t[1])
    set_attr(log, obj, "last_output", output)
    set_attr(log, obj, "closure", lambda: output)
    return output, obj


@row(plain)
def method_of_outside_object_stored(t, log, obj):
    set_attr(log, obj, "bound", types.MethodType(note, obj))
