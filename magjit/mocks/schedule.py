"""Put recipes in an order in which every object is made before it is used.

An object is made with its contents where that is possible. On a cycle of references one that can
be made empty is, and filled when the others exist. Keys and members of sets are completed before
they are hashed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from magjit.mocks.ir import Apply, Const, Do, Expr, Let, Line, Map, Step, hashed_refs, refs
from magjit.mocks.recipes import Fill, Make, SetState, get_dict, state_steps

_ON_STACK, _DONE = 1, 2


class Cycle(Exception):
    """A cycle of references through objects that all need their contents to be made."""

    def __init__(self, index: int) -> None:
        self.index = index
        super().__init__(index)


def schedule(recipes: dict[int, Make], used: list[int]) -> list[Line]:
    """Lines that make the objects ``used`` and all that they need.

    Raises:
        Cycle: the objects cannot be made from what Python offers.
    """
    _settle_states(recipes, used)
    return _Scheduler(recipes).run(used)


def _settle_states(recipes: dict[int, Make], used: list[int]) -> None:
    """Turn every SetState into steps; a namespace with one user loses its own recipe."""
    users = dict.fromkeys(recipes, 0)
    for index in used:
        users[index] += 1
    for recipe in recipes.values():
        for part in _parts(recipe):
            for index in set(_fill_refs(part)):
                users[index] += 1
    for recipe in recipes.values():
        fills: list[Step] = []
        for fill in recipe.fills:
            if isinstance(fill, SetState):
                fills += _settled(fill, recipes, users)
            else:
                fills.append(fill)
        recipe.fills = tuple(fills)
        if recipe.whole is None and not fills:
            recipe.whole, recipe.alloc = recipe.alloc, None


def _settled(fill: SetState, recipes: dict[int, Make], users: dict[int, int]) -> tuple[Step, ...]:
    names = recipes[fill.names.index]
    contents = names.whole
    if isinstance(contents, Map) and users[fill.names.index] == 1:
        names.whole, names.alloc, names.fills = Const(None), None, ()
        return state_steps(fill, contents)
    if fill.layout.dict_settable or contents is None:
        return state_steps(fill, None)
    # The object has its own namespace and lets nobody replace it: the others get that one.
    names.fills = (Do(Apply(dict.update, (fill.names, contents))),)
    names.whole, names.alloc = None, get_dict(fill.target, fill.layout)
    return ()


def _parts(recipe: Make) -> Iterator[Expr | Fill]:
    if recipe.whole is not None:
        yield recipe.whole
    else:
        if recipe.alloc is not None:
            yield recipe.alloc
        yield from recipe.fills


def _fill_refs(part: Expr | Fill) -> list[int]:
    if isinstance(part, SetState):
        return [part.names.index]
    return refs(part)


class _Scheduler:
    """One depth-first walk; ``_state`` says which objects are done or waiting for their parts."""

    def __init__(self, recipes: dict[int, Make]) -> None:
        self._recipes = recipes
        self._state: dict[int, int] = {}
        self._split: set[int] = set()
        self._pending: dict[int, deque[Step]] = {}
        self._completing: set[int] = set()
        self._lines: list[Line] = []

    def run(self, used: list[int]) -> list[Line]:
        for index in used:
            self._visit(index)
            self._fill_all()
        return self._lines

    def _fill_all(self) -> None:
        while self._pending:
            index = next(iter(self._pending))
            self._fill(index)

    def _fill(self, index: int) -> None:
        """Emit the steps that complete an object."""
        steps = self._pending.get(index)
        while steps:
            step = steps[0]
            for part in refs(step):
                self._visit(part)
                if self._state[part] == _ON_STACK and not self._make_empty(part):
                    raise Cycle(part)
            self._complete_keys(step)
            if steps and steps[0] is step:
                steps.popleft()
                self._lines.append(step)
        self._pending.pop(index, None)

    def _visit(self, root: int) -> None:
        """Make an object and all that it needs."""
        if self._state.get(root):
            return
        stack: list[tuple[int, Iterator[int]]] = []
        self._enter(root, stack)
        while stack:
            index, needs = stack[-1]
            for need in needs:
                state = self._state.get(need)
                if state == _ON_STACK and not self._make_empty(need):
                    self._break_cycle(need, stack)
                    break
                if state is None:
                    self._enter(need, stack)
                    break
            else:
                stack.pop()
                self._finish(index)

    def _enter(self, index: int, stack: list[tuple[int, Iterator[int]]]) -> None:
        self._state[index] = _ON_STACK
        expr = self._made_by(index)
        stack.append((index, iter(refs(expr))))

    def _made_by(self, index: int) -> Expr:
        recipe = self._recipes[index]
        expr = recipe.whole if recipe.whole is not None else recipe.alloc
        assert expr is not None, f"v{index} has no recipe"
        return expr

    def _finish(self, index: int) -> None:
        """All that an object waits for exists: make it."""
        recipe = self._recipes[index]
        if index in self._split:
            self._pending[index] = deque(_steps(recipe))
            return
        self._complete_keys(self._made_by(index))
        if index in self._split:  # a key of it needed it, empty as it was
            self._pending[index] = deque(_steps(recipe))
            return
        self._lines.append(Let(index, self._made_by(index), early=recipe.early))
        self._state[index] = _DONE
        if recipe.whole is None and recipe.fills:
            self._pending[index] = deque(_steps(recipe))

    def _make_empty(self, index: int) -> bool:
        """Make an object without its contents, if that is possible."""
        recipe = self._recipes[index]
        if recipe.whole is None or recipe.alloc is None or refs(recipe.alloc):
            return False
        self._lines.append(Let(index, recipe.alloc))
        self._state[index] = _DONE
        self._split.add(index)
        return True

    def _break_cycle(self, need: int, stack: list[tuple[int, Iterator[int]]]) -> None:
        """Make one object between ``need`` and the top empty; those above it start again."""
        while stack:
            index, _ = stack.pop()
            if index == need:
                break
            if self._make_empty(index):
                self._pending[index] = deque(_steps(self._recipes[index]))
                return
            self._state.pop(index)
        raise Cycle(need)

    def _complete_keys(self, part: Expr | Step) -> None:
        for key in hashed_refs(part):
            self._complete(key)

    def _complete(self, index: int) -> None:
        """Fill an object and what it refers to, as far as that is possible now."""
        if index in self._completing or not self._recipes[index].hashes_contents:
            return
        self._completing.add(index)
        try:
            self._fill(index)
        except Cycle:
            pass  # it refers to the object that it is a key of; eager hashed it incomplete, too
        for part in _parts(self._recipes[index]):
            for other in _fill_refs(part):
                self._complete(other)
        self._completing.discard(index)


def _steps(recipe: Make) -> Iterator[Step]:
    for fill in recipe.fills:
        assert not isinstance(fill, SetState)
        yield fill
