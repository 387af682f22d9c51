"""Data that moves, in every form of a report: the table, and the points-to graph as a picture."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from torch.fx.experimental.proxy_tensor import make_fx

from magjit.plugin import DataMovement, Edge, Moved, Place
from magjit.plugin.virtual_tensors.accounts import account, bytes_by_itself
from magjit.reporting.explaining import explain
from magjit.reporting.movement import draw, plain, size_text, summary
from magjit.reporting.report import Report
from tests.reporting.test_page import Checker

SVG = "{http://www.w3.org/2000/svg}"


def place(name: str, virtual: bool = True, size: int = 4096) -> Place:
    return Place(name, "float32 (32, 32)", size, virtual)


SMALL = DataMovement(
    "graph 1",
    (place("x", False), place("y", False), place("t"), place("c"), place("v")),
    (Edge("t", "x", "t"), Edge("c", "t", "cat"), Edge("c", "y", "cat"), Edge("v", "c", "view")),
    (Moved("cat", "aten.cat.default", 8192, 0), Moved("mm", "aten.mm.default", 5000, 5000)),
)


def boxes(picture: str) -> dict[str, tuple[float, float, float, float]]:
    found = {}
    for group in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        if rect is not None:
            name = group.findtext(f"{SVG}text")
            numbers = (float(rect.get(key, "")) for key in ("x", "y", "width", "height"))
            found[name] = tuple(numbers)
    return found


def test_sums_and_rows() -> None:
    assert (SMALL.before, SMALL.after) == (13192, 5000)
    assert "12.88 KiB" in summary(SMALL) and "4.883 KiB" in summary(SMALL)
    lines = plain(SMALL)
    assert lines[1].split() == ["cat", "aten.cat.default", "8", "KiB", "0", "B"]
    assert lines[3].startswith("in all")
    assert "c → y (cat)" in lines


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (5 << 40, "5120 GiB")],
)
def test_sizes_are_short(count: int, text: str) -> None:
    assert size_text(count) == text


def test_memory_is_on_the_right_of_what_is_virtual_of_it() -> None:
    found = boxes(draw(SMALL))
    assert set(found) == {"x", "y", "t", "c", "v"}
    for edge in SMALL.edges:
        start, end = found[edge.tensor], found[edge.target]
        assert start[0] + start[2] < end[0]
    values = list(found.values())
    for number, (x, y, width, height) in enumerate(values):
        for left, top, wide, high in values[number + 1 :]:
            assert x + width <= left or left + wide <= x or y + height <= top or top + high <= y


def test_every_edge_is_an_arrow_and_virtual_tensors_are_marked() -> None:
    root = ElementTree.fromstring(draw(SMALL))
    arrows = [one for one in root.iter(f"{SVG}path") if one.get("marker-end")]
    assert len(arrows) == len(SMALL.edges)
    kinds = [one.get("class") for one in root.iter(f"{SVG}g") if one.get("class")]
    assert sorted(kinds) == ["physical"] * 2 + ["virtual"] * 3


def test_of_many_tensors_the_largest_are_shown() -> None:
    places, edges = [], []
    for number in range(200):
        places += [place(f"p{number}", False, number), place(f"v{number}", True, number)]
        edges.append(Edge(f"v{number}", f"p{number}", "t"))
    found = boxes(draw(DataMovement("many", tuple(places), tuple(edges), ()), most=20))
    assert len(found) == 20
    assert "v199" in found and "v0" not in found


def test_nothing_virtual_is_no_picture() -> None:
    assert draw(DataMovement("none", (), (), SMALL.moved)) == ""


def test_names_are_escaped() -> None:
    evil = "<script>&"
    movement = DataMovement(
        evil,
        (Place(evil, evil, 4, True), Place("m", evil, 4, False)),
        (Edge(evil, "m", evil),),
        (Moved(evil, evil, 4, 0),),
    )
    page = Report(name="x", backend="y", movement=[movement]).to_html()
    assert "script" not in Checker(page).seen
    ElementTree.fromstring(draw(movement))


class Telling:
    """A backend that says what its graph moves."""

    name = "telling"

    def supports(self, gm) -> list[str]:
        return []

    def compile(self, gm, example_inputs, context):
        context.explain_movement(lambda: SMALL)
        return gm.forward


def test_every_form_of_a_report_has_it(tmp_path) -> None:
    report = explain(lambda x: x + 1, backend=Telling())(torch.ones(2))
    assert report.movement == [SMALL]
    assert "graph 1: 12.88 KiB if each operator ran by itself" in str(report)
    assert "c → t (cat)" in str(report)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(report)
    shown = console.export_text()
    assert "aten.cat.default" in shown and "12.88 KiB" in shown
    page = report.to_html()
    checker = Checker(page)
    assert "Data that moves" in checker.text and checker.seen["svg"] == 2
    content = json.loads(json.dumps(report.to_json()))
    assert content["movement"][0]["before"] == 13192
    assert content["movement"][0]["points_to"][1] == {
        "tensor": "c",
        "target": "t",
        "operator": "cat",
    }
    names = {path.name for path in report.dump(tmp_path)}
    assert {"movement.txt", "movement.svg"} <= names
    ElementTree.parse(tmp_path / "movement.svg")


def test_nobody_asked() -> None:
    from magjit.plugin import BackendContext

    context = BackendContext()
    context.explain_movement(lambda: pytest.fail("it was made"))
    assert context.movement == []


def test_bytes_of_operators() -> None:
    def function(x, y, i):
        one = y + x.t()
        two = y[:1].expand(8, 8) * 2
        return torch.cat([one, two]), y.view(-1), y.index_select(0, i)

    arguments = torch.rand(8, 8), torch.rand(8, 8), torch.zeros(2, dtype=torch.int64)
    gm = make_fx(function, tracing_mode="fake")(*arguments)
    found = {name: size for name, (_, size) in bytes_by_itself(gm.graph).items()}
    empty = make_fx(lambda: torch.empty(4, 4), tracing_mode="fake")()
    assert [size for _, size in bytes_by_itself(empty.graph).values()] == [0]
    assert found["t"] == found["view"] == found["expand"] == 0
    assert found["add"] == 3 * 256
    assert found["mul"] == 256 + 32  # what is expanded is read once
    assert found["cat"] == 2 * 512
    assert found["index_select"] == 64 + 64 + 16


def test_operators_that_run_otherwise_stand_in_one_row() -> None:
    before = {"mm": ("aten.mm.default", 100.0), "clone": ("aten.clone.default", 50.0)}
    after = {"mm_out": ("aten.mm.out", 90.0), "copy_": ("aten.copy_.default", 10.0)}
    made = account("graph", before, after, {})
    assert [(one.name, one.before, one.after) for one in made.moved] == [
        ("mm", 100, 90),
        ("clone", 50, 0),
        ("copy_", 0, 10),
    ]
