"""How a launch divides its work: R, and which warps have parts of a row, or rows."""

from __future__ import annotations

from math import prod

from magjit_dvm.cuda.adder_code import BESIDE_ADDERS
from magjit_dvm.cuda.forms import (
    BATCHED,
    CHUNKED,
    LANES,
    NORMS,
    ONLINE,
    READ_ONCE,
    SQUARES,
    form_of,
    may_be_several,
)
from magjit_dvm.cuda.machine import STAGES, Machine, count
from magjit_dvm.cuda.parts import MOST_EACH
from magjit_dvm.cuda.space import Operand, Space
from magjit_dvm.cuda.support import SMALL
from magjit_dvm.cuda.warps import (
    EACH_OF_ONCE,
    OF_CHUNKS,
    OF_GRADIENTS,
    OF_SMALL,
    WARPS,
    WARPS_OF_SQUARES,
    part_of_warp,
)
from magjit_dvm.cuda.words import (
    MAX_DRAWING,
    MAX_INPUTS,
    NO_WORD,
    OF_POSITIONS,
    PERIOD_SHIFT,
    WARP,
    Image,
)
from magjit_dvm.program import NodeKind
from magjit_dvm.vm import NotEncodable

__all__ = [
    "LEAST_TILES",
    "Machine",
    "arrange",
    "arrange_anew",
    "arrange_beside_adders",
    "arrange_gradients",
    "reductions_of",
]

_ENOUGH = 12 << 10
"""Elements of a tile's rows from which on narrower warps are better than more elements."""
_CHUNKS = {"table": (32, 2, 32 << 20), "any": (24, 3, 40 << 20), "four": (64, 2, 32 << 20)}
"""Of rows in chunks, where something is looked up, of columns that do not come by four, and of
those that do: R, the most rows of a block, and the most bytes of rows that are read again, which
then are in the L2 cache together."""
_OF_ONCE, _NEAR, _LEAST_OF_ONCE = (1, 2, 3), 8192, 4
"""Of rows that are read once, in chunks, the fewest warps of one, of up to so many columns, of
more, and of columns that do not come by four, which take longer; and rows of a block, from which on
those that would fit its registers come so, too."""
_FILLED = 4
"""Where nothing is reduced, lanes for each four of the fewest that may be more."""
LEAST_TILES, _LEAST_OF_NARROW, _LEAST_OF_CHUNKS = 4, 2, 3
"""Of a block, from which on it keeps vectors, and adders pay; from which on warps have several
rows: with fewer, a launch may share the kernel of stacks; and from which on a block has several
rows in chunks: with fewer, some would have much more to do than others."""
_WARPS_OF_NORMS = {each: most for each, most in OF_SMALL.items() if each >= 24}
"""More warps with fewer elements run more words: a log-softmax took 9 % longer with R = 16."""
_FEW = 12
"""Warps, below which those of the kernel of norms serve two vectors better."""
_MEETING, _OF_ROW = 7, 16
"""Row registers, and one more, are the 1024 bytes of a warp where rows' warps add up their sums;
and the most warps of a row there."""
_LEAST_PERIOD, _MOST_PERIOD = 128, 1 << (32 - PERIOD_SHIFT)
"""Bytes from which on what comes again after some rows is copied with them, each time anew; and the
rows from which on its number has more bits than there are."""
_LEAST_REPEAT = 32
"""Rows from which on what comes again after them is copied with tiles, which have fewer."""
_LONG, _NARROW = 1 << 16, 16
"""Elements below which any way is fast enough; columns from which on a row is long, and up to which
it is narrow: a warp has room for hundreds of them."""


def arrange(space: Space, image: Image, machine: Machine, late: frozenset[int]) -> bool:
    """Fill in how the space is divided; whether rows come in chunks.

    A tensor whose elements are in the order of the space comes through the stages, and one that has
    an element for each row, but for inputs that are loaded late.
    """
    image.rows, image.cols = space.rows, space.cols
    image.elements = space.rows * space.cols
    image.by_rows = bool(space.reduced)
    nodes = space.program.nodes
    loads = sorted({node.aux for node in nodes if node.kind is NodeKind.LOAD})
    tables = {node.aux for node in nodes if node.kind is NodeKind.INDEX}
    staged: list[tuple[int, int]] = []
    for number in loads:
        one = space.inputs[number]
        assert one is not None
        varies = all(one.strides[d] for d in space.active)
        if space.active and varies and space.contiguous(one) and len(staged) < MAX_INPUTS:
            staged.append((number, one.size))
    image.stages = STAGES if staged else 2
    if space.reduces:
        reads = sorted({*loads, *tables})
        _refuse_slow(space, image, [number for number, _ in staged], reads, machine)
    again: list[tuple[int, int, int]] = []
    if staged and image.by_rows and not image.sums:
        known = {number for number, _ in staged}
        operands = [(n, one) for n in loads if n not in known and (one := space.inputs[n])]
        again = [(n, one.size, by) for n, one in operands if (by := _repeats(space, one))]
        again = again[: MAX_INPUTS - len(staged)]
    sizes = [*(size for _, size in staged), *(size for _, size, _ in again)]
    _divide(space, image, machine, max(sizes, default=4), sum(sizes))
    if image.chunks == 1:
        staged += [(n, size) for n, size, _ in again]
        image.repeats = [period for *_, period in again]
    image.inputs = [(number, size, 0) for number, size in staged]
    if staged and image.by_rows:
        operands = [(n, one) for n in loads if n not in late and (one := space.inputs[n])]
        rows = [(n, one, _period(space, n, one)) for n, one in operands]
        rows = [one for one in rows if one[2] >= 0][: MAX_INPUTS - len(staged)]
        image.inputs += [(n, one.size, 0) for n, one, _ in rows]
        image.periods = [period for *_, period in rows]
    return image.chunks > 1


def _repeats(space: Space, one: Operand) -> int:
    """Of a tensor that is the same for outer dimensions, the rows after which it comes again.

    0 where they are few, or do not begin and end with 16 aligned bytes; and of other tensors.
    """
    along, period = _rows_along(space, one)
    columns = all(one.strides[d] for d in space.reduced & space.active)
    fits = one.low == 0 and period * space.cols * one.size % 16 == 0
    fits = fits and _LEAST_REPEAT <= period < min(_MOST_PERIOD, space.rows)
    return period if columns and fits and space.contiguous(one, along | space.reduced) else 0


def _rows_along(space: Space, one: Operand) -> tuple[frozenset[int], int]:
    """The inner dimensions of rows, if it is these, along which it varies; the rows that they have.

    None, and 0, of a tensor that varies along others.
    """
    rows = [d for d in space.order if d in space.kept]
    along = [d for d in rows if one.strides[d]]
    if along != rows[len(rows) - len(along) :]:
        return frozenset(), 0
    return frozenset(along), prod(space.size[d] for d in along)


def _period(space: Space, number: int, one: Operand) -> int:
    """0 of a tensor with 32 bits or 64 for each row, side by side in their order; −1 of others.

    Of what is the same for some outer dimensions, the rows after which it comes again.  A tensor
    that is expanded along the columns has columns for the program: it is loaded as a tile.
    """
    nodes = enumerate(space.program.nodes)
    loads = (n for n, node in nodes if node.kind is NodeKind.LOAD and node.aux == number)
    if any(space.has[n] & space.reduced for n in loads) or one.size < 4 or space.rows <= 1:
        return -1
    if space.contiguous(one, space.kept):
        return 0
    along, period = _rows_along(space, one)
    if not along or not space.contiguous(one, along):
        return -1
    fits = one.low == 0 and period * one.size % 16 == 0 and period < _MOST_PERIOD
    return period if fits and period * one.size >= _LEAST_PERIOD else -1


def _refuse_slow(
    space: Space, image: Image, staged: list[int], loads: list[int], machine: Machine
) -> None:
    """What ATen does better: large reductions along columns, and of few long rows.

    Raises:
        NotEncodable: it is one of these.
    """
    if not image.by_rows or image.elements <= (_LONG if image.cols > _LONG else SMALL):
        return
    operands = [one for n in loads if (one := space.inputs[n])]
    whole = [one for one in operands if all(one.strides[d] for d in space.active)]
    inner = space.order[-1]
    if not staged and not any(one.strides[inner] == one.size for one in whole or operands):
        raise NotEncodable("a large reduction along columns")
    if image.cols <= _NARROW:
        raise NotEncodable("a reduction of narrow rows")
    if image.cols >= _LONG and image.rows * 4 < machine.multiprocessors:
        raise NotEncodable("a reduction of few long rows")


def _divide(space: Space, image: Image, machine: Machine, widest: int, together: int) -> None:
    most = 16 if widest >= 4 or together > 8 else 32
    most = min(most, MAX_DRAWING) if space.draws else most
    least = 16 if space.has_positions else 8
    most = max(least, min(most, machine.widest))
    if not image.by_rows:
        most = min(most, 16) if together > 2 else most
        image.each = space.each or most
        while (
            not space.each
            and image.each > least
            and image.elements < 32 * image.each * machine.multiprocessors
        ):
            image.each //= 2
        slices = -(-image.elements // image.slice)
        wanted = -(-slices // machine.multiprocessors)
        image.group, image.warps = 1, max(1, min(WARPS[image.each], wanted))
    else:
        wanted = -(-image.rows // machine.multiprocessors)
        found = 0
        if not space.crowded:
            found = _each_for_rows(space, image, wanted, together, machine, WARPS)
        many = wanted >= _LEAST_OF_ONCE or not found
        if image.once and many and image.cols > WARP * EACH_OF_ONCE:
            _arrange_once(image, machine, WARPS)
            return
        image.each = found or most
        if image.sums and image.cols > WARPS[image.each] * image.slice:
            image.each = machine.widest  # words may turn out to have a kernel of their own
        chunks = max(-(-image.cols // (WARPS[image.each] * image.slice)), 1 + space.crowded)
        image.group = -(-image.cols // (chunks * image.slice))  # as much in each of them
        image.warps = image.group * max(1, min(WARPS[image.each] // image.group, wanted))
    count(image, machine)


def _arrange_once(image: Image, machine: Machine, most_warps: dict[int, int]) -> None:
    """Divide rows that are read once: in chunks, as many in a block as it has warps for.

    Much more of them is under way at once than registers have room for, and each waits little for
    others' warps.  All tiles of a block have about as many rows.
    """
    image.each = EACH_OF_ONCE
    most, halves = most_warps[image.each], -(-image.cols // (2 * image.slice))
    least = _OF_ONCE[2 if image.cols % 4 else image.cols > _NEAR]
    wanted = -(-image.rows // machine.multiprocessors)
    tiles = -(-wanted // (most // min(least, halves)))
    rows = -(-wanted // tiles)
    image.group = min(most // rows, halves)
    image.warps = rows * image.group
    count(image, machine)


def _each_for_rows(
    space: Space,
    image: Image,
    wanted: int,
    together: int,
    machine: Machine,
    most_warps: dict[int, int],
) -> int:
    """R for rows that fit a block's warps, and shared memory with two tiles saved; 0 without one.

    The most elements under way at once, up to what is enough, and as far as there is room for two
    stages of them, and for their sums across rows; of equals the fewest lanes without elements,
    then the most warps, which is what counts beside sums.
    """
    best, found = (0, 0), 0
    cols, kept = image.cols, image.sums + (image.sums > 0)  # and a tile that waits
    if cols * (together + max(8, 4 * kept)) > machine.shared_bytes:
        return found
    room = machine.shared_bytes * 7 // (16 * max(together + 2 * kept, 1))
    room = cols if kept and 2 * cols > room else room
    widest = min(machine.widest, 32) if space.has_positions else machine.widest
    widest = min(widest, MOST_EACH) if kept else widest
    widest = MAX_DRAWING if space.draws else widest
    reduces = space.reduces
    lanes = {each: -(-cols // (32 * each)) * each for each in most_warps if 8 < each <= widest}
    for each, warps in sorted(most_warps.items()):
        if each > widest or (space.has_positions and each not in OF_POSITIONS):
            continue
        if not reduces and _FILLED * lanes.get(each, 0) > (_FILLED + 1) * min(lanes.values()):
            continue  # nobody waits for other warps of a row: what counts is how many are busy
        group = -(-cols // (32 * each))
        rows = min(warps // group, wanted)
        score = min(rows * cols, room, _ENOUGH), -group * each
        if rows and score > best:
            best, found = score, each
    return found


def arrange_beside_adders(image: Image, machine: Machine) -> int:
    """Divide rows that fit a block anew, beside warps that add up sums across them.

    Returns: how many times four columns a lane of those has; 0 where it would not pay.
    """
    found = [one for most, *one in BESIDE_ADDERS if image.cols <= most]
    if not found:
        return 0
    each, quads = found[0]
    each = min(each, machine.widest)
    adders = -(-image.cols // (128 * quads))
    if not _divide_anew(image, machine, each, OF_SMALL[each] - adders):
        return 0
    image.adders = adders
    return quads


def arrange_gradients(image: Image, machine: Machine) -> bool:
    """Divide rows of norms' gradients anew, among warps whose lanes keep sums of own columns.

    Returns: whether it pays, and there is room for two stages.
    """
    found = [
        one for one in OF_GRADIENTS.items() if image.cols <= 32 * one[0] * min(one[1], _OF_ROW)
    ]
    if not found:
        return False
    each, most = found[0]
    lanes = -(-image.cols // (32 * each)) * 32 * each
    if image.cols <= BESIDE_ADDERS[-1][0] and 8 * image.cols < 7 * lanes:
        return False
    before = image.each, image.group, image.warps, image.numbers, image.scratch
    image.numbers, image.scratch = _MEETING, 0
    if _divide_anew(image, machine, each, most):
        while not machine.has_room(image, 1):
            if image.warps == image.group:
                break
            machine.shrink(image)
        else:
            image.weights = 0
            return True
    image.each, image.group, image.warps, image.numbers, image.scratch = before
    count(image, machine)
    return False


def arrange_anew(space: Space, image: Image, machine: Machine) -> None:
    """Divide norms and squares anew, among the warps that their kernels have registers for.

    A block has to have several tiles; if not, the launch may share the kernel of stacks.
    """
    if _arrange_several(space, image, machine):
        return
    form = form_of(image)
    if form in (NORMS, BATCHED):
        _arrange_norms(space, image, machine)
    elif form == SQUARES:
        slices = LEAST_TILES * WARPS_OF_SQUARES * machine.multiprocessors
        if image.elements >= slices * image.slice:
            image.warps = WARPS_OF_SQUARES
            count(image, machine)
    elif form in (CHUNKED, READ_ONCE):
        _arrange_chunks(space, image, machine)


def _arrange_several(space: Space, image: Image, machine: Machine) -> bool:
    """Give rows that leave lanes without elements a part of a warp each; whether that is so."""
    part = part_of_warp(image.cols)
    around = image.epilogue != NO_WORD or space.has_positions or space.draws or image.sums
    if not image.by_rows or image.chunks > 1 or part is None or around or not may_be_several(image):
        return False
    form, each = part
    rows = WARPS[each] * (WARP // LANES[form])
    if image.rows < _LEAST_OF_NARROW * rows * machine.multiprocessors:
        return False
    _scale_scratch(image, each)
    image.each, image.group, image.lanes, image.warps = each, 1, LANES[form], WARPS[each]
    count(image, machine)
    return True


def _arrange_chunks(space: Space, image: Image, machine: Machine) -> None:
    """Divide rows in chunks anew, into as few as their kernel has warps for.

    A block has several rows, so that one is computed while the warps of another meet.  What passes
    read again is in the L2 cache, where no stage keeps it.
    """
    if image.once:
        _arrange_once(image, machine, OF_CHUNKS)
        return
    kind = "table" if space.has_positions else "any" if image.cols % 4 else "four"
    each, rows, near_bytes = _CHUNKS[kind]
    each = min(each, machine.widest)
    _scale_scratch(image, each)
    image.each = each
    tiles = image.inputs[: len(image.inputs) - image.row_inputs]
    a_row = image.cols * sum(size for _, size, _ in tiles) * (len(image.first) > 1)
    near = near_bytes // (machine.multiprocessors * a_row) if a_row else rows
    many = image.rows // (_LEAST_OF_CHUNKS * machine.multiprocessors)
    rows = max(1, min(rows, near, many))
    warps = OF_CHUNKS[each] // rows
    chunks = max(2, -(-image.cols // (warps * image.slice)))
    image.group = -(-image.cols // (chunks * image.slice))
    image.warps = rows * image.group
    count(image, machine)


def _scale_scratch(image: Image, each: int) -> None:
    """Places in scratch memory, of which words have R times a number."""
    for word in image.words:
        if word.first.endswith(".scratch") or word.first == "save":
            word.w1 = word.w1 // image.each * each


def _arrange_norms(space: Space, image: Image, machine: Machine) -> None:
    """Divide rows anew that are wide and reduced, or of which much is computed, or nothing written.

    Those of up to 8192 columns, which are two to a block with R = 64, are so with R = 32 as well,
    in twice the warps.  Words are as they were: where nothing is in scratch memory, none of them
    tells R.  Where no tiles are written, or nothing is reduced, R = 64 is faster.
    """
    tiles = image.inputs[: len(image.inputs) - image.row_inputs]
    stores = any(word.first.startswith("st.") for word in image.words)
    reductions = reductions_of(image)
    if image.each < 32 or not tiles or image.scratch:
        return
    wanted = -(-image.rows // machine.multiprocessors)
    together = sum(size for _, size, _ in tiles)
    each = 0
    if image.each > 32 and stores and reductions:
        each = _each_for_rows(space, image, wanted, together, machine, _WARPS_OF_NORMS)
    elif image.each == 32 and (not stores or _computes_much(image, reductions)):
        each = 32
    if each:
        _divide_anew(image, machine, each, _WARPS_OF_NORMS[each])


def reductions_of(image: Image) -> int:
    """How many words reduce a row."""
    return sum(word.first.startswith("row.") or word.first in ONLINE for word in image.words)


def _computes_much(image: Image, reductions: int) -> bool:
    """Whether warps, not memory, are what rows wait for: with several reductions, or several
    numbers of rows, or several vectors where there are few warps.
    """
    vectors = {word.pointer for word in image.words if word.first.startswith("lt.c.")}
    return reductions > 1 or image.row_inputs > 1 or (len(vectors) > 1 and image.warps <= _FEW)


def _divide_anew(image: Image, machine: Machine, each: int, most: int) -> bool:
    """Rows among so many warps, where each block then has several tiles; whether that is so."""
    group = -(-image.cols // (32 * each))
    rows = most // group
    if image.rows < LEAST_TILES * rows * machine.multiprocessors:
        return False
    image.each, image.group, image.warps = each, group, rows * group
    count(image, machine)
    return True
