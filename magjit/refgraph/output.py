"""What a program shows: printed text and warnings, which a replay shows again.

The text is that of the run: what it depends on is guarded. Text that only an object's own Python
code or a tensor's data can give splits instead.
"""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

from magjit import _C
from magjit.annotations import Rule
from magjit.refgraph import relations as r
from magjit.refgraph.containers import read_value, shows_a_set
from magjit.refgraph.kinds import CONTAINERS, is_atom, is_constant_object
from magjit.refgraph.recorder import StateRecorder
from magjit.refgraph.stack import observed_frame
from magjit.refgraph.texts import shown_text

_DEPTH = 20


def _is_plain_text(value: Any, depth: int = 0) -> bool:
    """Whether C code alone makes the text of a value, from contents that a guard can compare."""
    if is_atom(value) or (is_constant_object(value) and type(type(value)) is type):
        return True
    if type(value) not in CONTAINERS or depth > _DEPTH:
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else list(value)
    return all(_is_plain_text(item, depth + 1) for item in items)


def printed(
    rec: StateRecorder, rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``print`` to the standard output or error, whatever they are at the time of the replay."""
    values = (*args, *(value for name, value in kwargs.items() if name != "file"))
    file = kwargs.get("file")
    plain = all(_is_plain_text(value) and not shows_a_set(value) for value in values)
    if (
        not plain
        or not (file is None or file is sys.stderr)
        or _is_written(rec, vars(sys), "stdout", "stderr")
    ):
        rec.split(f"calls {rule.name}: {rule.reason}", "print plain values")
        return _C.OPAQUE
    for value in values:
        read_value(rec, value, deep=True)
    text = tuple(shown_text(rec, value) for value in args)
    rec.numbers.pin(rec.numbers.among(kwargs.values()))
    rec.replay_call(_print_error if file is sys.stderr else print, text, _without(kwargs, "file"))
    return _C.OPAQUE


def _print_error(*args: Any, **kwargs: Any) -> None:
    print(*args, file=sys.stderr, **kwargs)


def _without(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}


def warned(
    rec: StateRecorder, rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``warnings.warn``: the replay warns of the same line, through the same registry."""
    call = _warn_arguments(*args, **kwargs) if func is warnings.warn else None
    frame = observed_frame(rec)
    if call is None or frame is None or not _is_plain_text(call[0]):
        rec.split(f"calls {rule.name}: {rule.reason}", "warn with a plain text")
        return _C.OPAQUE
    message, category, level = call
    for _ in range(level - 1):
        frame = _calling_frame(rec, frame)
        if frame is None:
            rec.split("warns of a line outside the program")
            return _C.OPAQUE
    action = _action(message, category, frame)
    if _changed_filters(rec):
        if action != "ignore":
            rec.split("warns while it changes the warning filters")
        return _C.OPAQUE
    rec.read(rec.root(vars(warnings)), r.Item.of("filters"), warnings.filters)
    rec.open(rec.graph.node_of(warnings.filters), deep=True)
    if action == "error":
        return None  # the call raises, now and as long as the filters are these
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__") or "<string>"
    where = (frame.f_code.co_filename, frame.f_lineno, module)
    rec.root(registry)
    rec.replay_call(warnings.warn_explicit, (str(message), category, *where, registry), {})
    return _C.OPAQUE


def _changed_filters(rec: StateRecorder) -> bool:
    """Whether the filters are not those that a replay would find."""
    kept = rec.graph.node_of(warnings.filters)
    return _is_written(rec, vars(warnings), "filters") or (kept is not None and kept.changed)


def _is_written(rec: StateRecorder, namespace: dict[str, Any], *names: str) -> bool:
    """Whether the run has assigned to a name."""
    node = rec.graph.node_of(namespace)
    return node is not None and any(
        isinstance(relation, r.Item) and relation.key.key in names for relation in node.written
    )


def _action(message: str, category: type[Warning], frame: types.FrameType) -> str:
    """What the filters say of a warning."""
    module = frame.f_globals.get("__name__") or "<string>"
    for action, text, kind, where, line in warnings.filters:
        if (
            (text is None or text.match(message))
            and issubclass(category, kind)
            and (where is None or where.match(module))
            and line in (0, frame.f_lineno)
        ):
            return str(action)
    return str(warnings.defaultaction)  # type: ignore[attr-defined]


def _warn_arguments(
    message: Any,
    category: Any = None,
    stacklevel: int = 1,
    source: Any = None,
    *,
    skip_file_prefixes: tuple[str, ...] = (),
) -> tuple[Any, Any, int] | None:
    """(message, category, stack level), or None where a replay cannot do the same."""
    plain = type(message) is str and source is None and not skip_file_prefixes
    return (message, category or UserWarning, max(int(stacklevel), 1)) if plain else None


def _calling_frame(rec: StateRecorder, frame: types.FrameType) -> types.FrameType | None:
    """The caller, as long as it belongs to the program that is observed."""
    caller = frame.f_back
    module = caller.f_globals.get("__name__", "") if caller is not None else ""
    return None if module.partition(".")[0] == "magjit" else caller
