"""Changes of one place: an attribute, an item, a global variable, a closure cell."""

from __future__ import annotations

import types

import torch

from magjit.mocks import DELETED, AttrWrite, CellWrite, GlobalWrite, SlotWrite
from tests.mocks import things
from tests.mocks.effects import abc, ordered, plain, row, set_attr, set_item, three


@row(plain)
def new_attribute(t, log, obj):
    set_attr(log, obj, "new", t[0])


@row(plain)
def existing_attribute(t, log, obj):
    set_attr(log, obj, "a0", [t[0]])
    return obj


@row(plain)
def attribute_written_often(t, log, obj):
    for i in range(3):
        set_attr(log, obj, "count", i)
        set_attr(log, obj, f"value{i}", t[i])


@row(plain)
def intermediate_value_that_cannot_be_made(t, log, obj):
    set_attr(log, obj, "handle", (x for x in t))
    set_attr(log, obj, "handle", None)


@row(plain, again=False)
def deleted_attribute(t, log, obj):
    set_attr(log, obj, "a0", DELETED)


@row(plain)
def attribute_set_and_deleted(t, log, obj):
    set_attr(log, obj, "temporary", t[0])
    set_attr(log, obj, "temporary", DELETED)


@row(plain)
def attribute_deleted_and_set_again(t, log, obj):
    set_attr(log, obj, "a0", DELETED)
    set_attr(log, obj, "z", 1)
    set_attr(log, obj, "a0", t[0])


@row(lambda: things.Slotted(1, 2))
def slot(t, log, obj):
    set_attr(log, obj, "x", t[0], via="object.__setattr__")


@row(lambda: things.Slotted(1, 2))
def slot_set_and_deleted(t, log, obj):
    set_attr(log, obj, "unset", 1, via="setattr")
    set_attr(log, obj, "unset", DELETED, via="setattr")


@row(lambda: things.SlottedChild(1, 2, 3))
def slot_under_another_of_its_name(t, log, obj):
    for slot, value in ((things.Slotted.x, t[0]), (things.SlottedChild.x, [1])):
        slot.__set__(obj, value)
        log.append(SlotWrite(obj, slot, value))


@row(lambda: things.Guarded(1))
def attribute_set_and_deleted_past_setattr(t, log, obj):
    set_attr(log, obj, "y", t[0], via="object.__setattr__")
    set_attr(log, obj, "y", DELETED, via="object.__setattr__")


@row(lambda: lambda x=1: x)
def defaults_of_a_function(t, log, func):
    func.__defaults__ = (t[0],)
    log.append(SlotWrite(func, types.FunctionType.__dict__["__defaults__"], func.__defaults__))


@row(lambda: things.Frozen(1, 2))
def frozen_dataclass(t, log, obj):
    set_attr(log, obj, "a", t[0])
    set_attr(log, obj, "b", [t[0]], via="object.__setattr__")


@row(lambda: things.WithProperty(1))
def attribute_under_a_property(t, log, obj):
    obj.__dict__["shadowed"] = t[0]
    log.append(AttrWrite(obj, "shadowed", t[0], "instance_dict"))


@row(plain)
def attribute_that_is_no_name(t, log, obj):
    obj.__dict__["not a name"] = t[0]
    log.append(AttrWrite(obj, "not a name", t[0], "instance_dict"))


@row(lambda: things.Net(torch.ones(1)), inner=lambda net: [net._buffers, net._parameters])
def module_attribute_and_buffer(t, log, net, buffers, parameters):
    set_attr(log, net, "seen", [t[0]])
    set_item(log, buffers, "buffer", t[1])
    set_item(log, parameters, "late", None)


@row(lambda: types.ModuleType("m"))
def module_variable(t, log, module):
    log.append(AttrWrite(module, "x", t[0]))
    module.x = t[0]


@row(plain, plain)
def one_new_object_in_two_places(t, log, a, b):
    part = {"t": t[0]}
    set_attr(log, a, "part", part)
    set_attr(log, b, "part", (part, part))
    return part


@row(plain)
def new_object_that_holds_the_outside_one(t, log, obj):
    made = things.Plain(obj, t[0])
    set_attr(log, obj, "made", made)
    return [made]


@row(plain)
def new_object_changed_after_it_was_stored(t, log, obj):
    part = []
    set_attr(log, obj, "part", part)
    part.append(t[0])
    part.append(part)


@row(plain)
def writes_to_a_new_object_say_nothing(t, log, obj):
    made = things.Plain()
    set_attr(log, made, "x", object())
    set_attr(log, made, "x", t[0])
    return made


@row(plain, plain)
def swap(t, log, a, b):
    x, y = a.a0, b.a0
    set_attr(log, a, "a0", y)
    set_attr(log, b, "a0", x)


@row(plain, plain)
def outside_object_stored_outside(t, log, a, b):
    set_attr(log, a, "friend", b)
    set_attr(log, b, "friend", a)


@row(abc)
def dict_item(t, log, d):
    set_item(log, d, "a", t[0])
    set_item(log, d, "new", [t[1]])


@row(abc, again=False)
def dict_item_deleted(t, log, d):
    set_item(log, d, "a", DELETED)


@row(abc)
def dict_item_moved_to_the_end(t, log, d):
    set_item(log, d, "a", DELETED)
    set_item(log, d, "a", t[0])


@row(abc)
def dict_order_of_new_keys(t, log, d):
    set_item(log, d, "y", 1)
    set_item(log, d, "z", 2)
    set_item(log, d, "y", 3)
    set_item(log, d, "temporary", 3)
    set_item(log, d, "x", 4)
    set_item(log, d, "temporary", DELETED)


@row(abc)
def odd_keys(t, log, d):
    for key in (1, 2.5, None, (1, "a"), b"x", frozenset({1})):
        set_item(log, d, key, t[0])


@row(dict)
def new_object_as_a_key(t, log, d):
    key = things.ByValue((1, "x"))
    set_item(log, d, key, key)


@row(dict, plain)
def outside_object_as_a_key(t, log, d, obj):
    set_item(log, d, obj, t[0])


@row(lambda: things.LoudDict(a=1))
def item_of_a_dict_subclass(t, log, d):
    set_item(log, d, "a", t[0])
    set_item(log, d, "b", 1)
    set_item(log, d, "b", DELETED)


@row(ordered)
def item_of_an_ordered_dict(t, log, d):
    set_item(log, d, "a", t[0])
    set_item(log, d, "b", DELETED)
    set_item(log, d, "b", t[1])


@row(three)
def list_item(t, log, items):
    set_item(log, items, 1, t[0])


@row(lambda: things.LoudList([1, 2]))
def item_of_a_list_subclass(t, log, items):
    set_item(log, items, 1, t[0])


@row(lambda: {"__name__": "m", "counter": 0})
def global_variable(t, log, names):
    log.append(GlobalWrite(names, "counter", 1))
    log.append(GlobalWrite(names, "last", [t[0]]))
    names["counter"] = 1
    names["last"] = [t[0]]


@row(lambda: {"__name__": "m", "counter": 0}, again=False)
def global_deleted(t, log, names):
    log.append(GlobalWrite(names, "counter", DELETED))
    del names["counter"]


@row(lambda: types.CellType(1))
def cell(t, log, found):
    log.append(CellWrite(found, [t[0]]))
    found.cell_contents = [t[0]]


@row(lambda: types.CellType(1))
def cell_emptied(t, log, found):
    if found != types.CellType():
        del found.cell_contents
    log.append(CellWrite(found, DELETED))
