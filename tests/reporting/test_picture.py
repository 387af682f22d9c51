"""The reference graph as a picture: what is folded, that boxes do not overlap, that it is SVG."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

from magjit.reporting.content import ObjectView, Role
from magjit.reporting.explaining import explain
from magjit.reporting.folding import fold
from magjit.reporting.picture import draw, lay_out

from . import programs

OUTSIDE = ObjectView(0, 0, "outside", "", Role.OUTSIDE, "outside")


def view(number: int, parent: int, label: str, role: Role = Role.OBJECT, **parts) -> ObjectView:
    return ObjectView(number, parent, label, parts.pop("type_name", "Thing"), role, label, **parts)


@pytest.fixture(scope="module")
def deep() -> list[ObjectView]:
    return explain(programs.Deep())(torch.ones(2, 8)).objects


def by_label(objects, **options) -> dict[str, object]:
    return {box.label: box for box in fold(objects, **options)}


def test_nothing_gives_nothing() -> None:
    assert fold([]) == []
    assert draw([]) == ""


def test_a_dict_of_attributes_joins_its_owner() -> None:
    objects = [
        OUTSIDE,
        view(1, 0, "model", Role.MODULE),
        view(2, 1, ".__dict__", Role.CONTAINER, hidden=True, changed=True, facts=(".n = 1",)),
        view(3, 2, ".child", Role.MODULE),
    ]
    boxes = by_label(objects)
    assert list(boxes) == ["outside", "model", ".child"]
    assert boxes["model"].facts == [".n = 1"] and boxes["model"].changed
    assert boxes[".child"].parent == 1


def test_code_is_counted_by_whose_it_is() -> None:
    code = [view(n, 0, f"f{n}", Role.CODE, library=n < 4) for n in range(1, 6)]
    boxes = by_label([OUTSIDE, *code])
    assert boxes["torch and Python"].type_name == "3 functions and the like"
    assert boxes["the program's code"].facts == ["f4", "f5"]
    assert len(boxes) == 3


def test_code_that_was_changed_or_leads_somewhere_is_shown() -> None:
    objects = [
        OUTSIDE,
        view(1, 0, "globals of m", Role.CODE, changed=True),
        view(2, 0, "globals of torch", Role.CODE, library=True),
        view(3, 2, ".state", Role.CONTAINER, changed=True),
        view(4, 2, ".constant", Role.CONTAINER),
        view(5, 0, "f.<cell>"),
    ]
    assert list(by_label(objects)) == [
        "outside",
        "globals of m",
        "globals of torch",
        ".state",
        "the program's code",
    ]


def test_tables_of_hooks_without_hooks_are_left_out() -> None:
    hooks = view(2, 1, "._forward_hooks", Role.CONTAINER, facts=("length = 0",))
    objects = [OUTSIDE, view(1, 0, "model", Role.MODULE), hooks]
    assert list(by_label(objects)) == ["outside", "model"]
    objects[2] = replace(hooks, facts=("length = 1",))
    assert list(by_label(objects)) == ["outside", "model", "._forward_hooks"]


def test_layers_that_are_alike_are_shown_once(deep) -> None:
    boxes = by_label(deep)
    assert boxes["[0]"].note == "and 11 more like it"
    assert "[1]" not in boxes
    assert len(boxes) < 20


def test_a_layer_that_differs_is_shown() -> None:
    torch.manual_seed(0)
    model = programs.Deep()
    model.blocks[7] = torch.nn.Identity()
    boxes = by_label(explain(model)(torch.ones(2, 8)).objects)
    assert boxes["[0]"].note == "and 10 more like it"
    assert boxes["[7]"].type_name == "Identity"


def test_a_shared_object_is_linked() -> None:
    objects = [
        OUTSIDE,
        view(1, 0, "a", Role.MODULE),
        view(2, 0, "b", Role.MODULE, links=(3,), type_name="Other"),
        view(3, 1, ".weight", Role.TENSOR),
    ]
    assert by_label(objects)["b"].links == {3}
    assert 'class="link"' in draw(objects)


def test_the_shared_weight_of_a_model_is_linked(deep) -> None:
    boxes = {box.label: box for box in fold(deep)}
    assert any(box.links for box in boxes.values()), "the shared weight is not linked"


@pytest.mark.parametrize("limit", [1, 2, 5, 40])
def test_no_more_boxes_than_asked_for(limit: int) -> None:
    objects = [OUTSIDE]
    for n in range(1, 300):  # every one of another type, so that nothing is alike
        objects.append(view(n, n // 3, f"o{n}", type_name=f"T{n}"))
    boxes = fold(objects, limit)
    assert len(boxes) == limit
    keys = {box.key for box in boxes}
    assert all(box.parent in keys for box in boxes)
    hidden = sum(int(box.note.split()[0]) for box in boxes if box.note)
    assert hidden == 300 - limit


def test_boxes_do_not_overlap(deep) -> None:
    places = list(lay_out(fold(deep)).values())
    for index, one in enumerate(places):
        for other in places[index + 1 :]:
            apart_x = one.x + one.width <= other.x or other.x + other.width <= one.x
            assert apart_x or abs(one.y - other.y) >= 32, (one, other)


def test_thousands_of_objects_are_drawn_quickly_and_small() -> None:
    objects = [OUTSIDE]
    for n in range(1, 5000):
        objects.append(view(n, (n - 1) // 4, f"o{n}", type_name=f"T{n % 17}"))
    assert len(draw(objects)) < 200_000


def test_the_picture_is_well_formed(deep) -> None:
    root = ElementTree.fromstring(draw(deep))
    assert root.tag.endswith("svg")
    labels = [element.text for element in root.iter() if element.tag.endswith("}text")]
    assert {"outside", "model", ".blocks", "args[0]"} <= set(labels)
    titles = [element.text for element in root.iter() if element.tag.endswith("}title")]
    assert any("requires_grad" in title for title in titles)


def test_names_are_escaped() -> None:
    objects = [OUTSIDE, view(1, 0, "<b>&\"'", facts=("x = '</title><script>'",))]
    root = ElementTree.fromstring(draw(objects))
    assert "<b>&\"'" in [element.text for element in root.iter()]
