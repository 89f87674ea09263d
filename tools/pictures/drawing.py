"""Motions as SVG, legible on light and dark pages: each picture is a card with colours of its own."""

from __future__ import annotations

from collections.abc import Sequence

from tools.pictures.motion import SAME, WORLD, Cell, Motion, Term

WIDTH, CELL, BAND = 340, 22, 12
LEFT, RIGHT, BOX = 54, 208, 118

_STYLE = """<style>
text{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#1b1f24}
.title{font-weight:700}.small{fill:#57606a}
.card{fill:#f6f8fa;stroke:#d0d7de}.line{stroke:#8c959f;fill:none}
.s0{fill:#9cc9f5}.s1{fill:#f7c58b}.s2{fill:#a5dfb5}.same{fill:#d9c6f3}
.zero{fill:none;stroke:#8c959f;stroke-dasharray:3 2}
.edge{fill:none;stroke:#57606a;stroke-width:.8}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#a5b0bb}
.card{fill:#1c2128;stroke:#444c56}.line,.zero{stroke:#8b949e}.edge{stroke:#8b949e}
.s0{fill:#1f5a94}.s1{fill:#8a5414}.s2{fill:#22693a}.same{fill:#5b4088}}
</style>"""


def picture_of(title: str, forward: Motion, backward: Motion, captions: tuple[str, str]) -> str:
    """A verb's picture: what the ranks hold, forward above backward."""
    upper = _panel(forward, "x", f"forward, {forward.src} to {forward.dst}: {captions[0]}", 34)
    lower = _panel(backward, "g", f"backward, {backward.src} to {backward.dst}: {captions[1]}", upper[1] + 10)
    return _card(title, [upper[0], lower[0]], lower[1])


def types_picture(reads: dict[str, tuple[str, str]]) -> str:
    """The four types: what three ranks hold, and the gradient of it. `reads`: of each letter its name and its dual."""
    top, body = 34, []
    for letter, (name, dual) in reads.items():
        value, gradient = _held(letter), _held(dual)
        body.append(_text(14, top + 12, f"{letter}: {name}", "title"))
        body.append(_text(RIGHT, top + 12, f"its gradient: {dual}", "small"))
        top += 20
        for rank in range(WORLD):
            body.append(_text(14, top + 15, f"rank {rank}", "small"))
            body.append(_owned(LEFT + 10, top, value[rank], "x", letter))
            body.append(_owned(RIGHT, top, gradient[rank], "g", dual))
            top += CELL + 4
        top += 12
    return _card("what the ranks hold", body, top - 12)


def _held(kind: str) -> list[Cell]:
    ranks = [SAME] * WORLD if kind in "RI" else range(WORLD)
    return [Cell((Term(rank, 0, 1.0),)) for rank in ranks]


def _owned(left: float, top: float, cell: Cell, letter: str, kind: str) -> str:
    """A rank's cell; of a pending sum it says that more belongs to it."""
    pending = "a term, " if kind == "P" else ""
    return _box(left, top, cell, pending + letter)


def _card(title: str, body: Sequence[str], bottom: int) -> str:
    height = bottom + 8
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{_escaped(title)}">',
            _STYLE,
            f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
            _text(14, 22, title, "title"),
            *body,
            "</svg>\n",
        )
    )


def _panel(motion: Motion, letter: str, caption: str, top: int) -> tuple[str, int]:
    """One direction, as SVG, and where it ends."""
    out = []
    for line in _wrapped(caption, 48):
        out.append(_text(14, top + 12, line, "small"))
        top += 15
    top += 6
    middles, several = [], motion.elements > 1
    boxes = []
    for rank in range(WORLD):
        before, after = motion.before[rank], motion.after[rank]
        tall = max(len(before), len(after), 1) * CELL
        boxes.append(_text(8, top + tall / 2 + 4, f"rank {rank}", "small"))
        for cells, left in ((before, LEFT), (after, RIGHT)):
            start = top + (tall - len(cells) * CELL) / 2
            boxes += [_box(left, start + at * CELL, cell, letter, several) for at, cell in enumerate(cells)]
            if not cells:
                boxes.append(_text(left + 34, top + tall / 2 + 4, "(empty)", "small"))
        middles.append(top + tall / 2)
        top += tall + BAND
    for source, target in _arrows(motion):
        out.append(
            f'<path class="line" d="M{LEFT + BOX} {middles[source]:g}C{LEFT + BOX + 18} {middles[source]:g} '
            f'{RIGHT - 18} {middles[target]:g} {RIGHT} {middles[target]:g}"/>'
        )
    return "\n".join([*out, *boxes]), top - BAND


def _arrows(motion: Motion) -> list[tuple[int, int]]:
    """Which rank's operand has a part in which rank's result; a value that all hold comes from the rank itself."""
    found = {
        (target if term.rank == SAME else term.rank, target)
        for target, cells in enumerate(motion.after)
        for cell in cells
        for term in cell.terms
    }
    return sorted(found)


def _box(left: float, top: float, cell: Cell, letter: str, several: bool = False) -> str:
    """A cell: a stripe for each rank that has a part in it, and what it is."""
    if not cell.terms:
        box = f'<rect class="zero" x="{left:g}" y="{top:g}" width="{BOX}" height="{CELL - 2}" rx="3"/>'
        return box + _text(left + BOX / 2, top + 14, "0", "small", middle=True)
    ranks = sorted({term.rank for term in cell.terms})
    wide = BOX / len(ranks)
    stripes = "".join(
        f'<rect class="{"same" if rank == SAME else f"s{rank}"}" x="{left + at * wide:g}" y="{top:g}" '
        f'width="{wide:g}" height="{CELL - 2}"/>'
        for at, rank in enumerate(ranks)
    )
    edge = f'<rect class="edge" x="{left:g}" y="{top:g}" width="{BOX}" height="{CELL - 2}"/>'
    return stripes + edge + _text(left + BOX / 2, top + 14, _label(cell, letter, several), "", middle=True)


def _label(cell: Cell, letter: str, several: bool) -> str:
    names = []
    for term in cell.terms:
        own = "" if term.rank == SAME else str(term.rank)
        names.append(f"{letter}{own}" + (f"[{term.element}]" if several else ""))
    shares = {round(term.factor, 6) for term in cell.terms}
    share = shares.pop() if len(shares) == 1 else 1.0
    # A sum over all ranks of one element is too wide to be written out where elements have numbers.
    over_all = several and len(names) == len({term.rank for term in cell.terms}) == WORLD
    one_element = len({term.element for term in cell.terms}) == 1
    text = f"sum of {letter}[{cell.terms[0].element}]" if over_all and one_element else "+".join(names)
    if share == 1.0:
        return text
    by = f"/{round(1 / share)}" if share < 1 else f"*{share:g}"
    return (f"({text})" if len(names) > 1 else text) + by


def _text(x: float, y: float, text: str, kind: str, middle: bool = False) -> str:
    at = ' text-anchor="middle"' if middle else ""
    of = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{of}{at}>{_escaped(text)}</text>'


def _wrapped(text: str, width: int) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
