"""The picture of a timeline: each rank's computation and transfers, with arrows from forward to backward calls."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch

from gradmesh.verify.simulator.trace import Event, Work

# From the color-blind-safe palette of Okabe and Ito.
_COLOURS = {"forward": "#0072B2", "backward": "#D55E00", "tangent": "#009E73"}
_PALE = {"forward": "#9FCBE6", "backward": "#F2BE98", "tangent": "#A3D9C8"}
_WAITS = "#DDDDDD"
_HEIGHT = 0.8

Row = tuple[int, str]
"""A rank and an axis; "" for the rank's computation."""


def drawn(events: Iterable[Event], work: Iterable[Work], title: str = "") -> Figure:
    """The picture."""
    calls, working = list(events), list(work)
    used = {(one.rank, "") for one in working} | {(event.rank, "") for event in calls}
    used |= {(event.rank, event.axis) for event in calls}
    rows = {row: -place for place, row in enumerate(sorted(used))}
    figure = Figure(figsize=(12, 1.6 + 0.6 * len(rows)), dpi=130, layout="constrained")
    axes = figure.subplots()
    for one in working:
        _bar(axes, rows[one.rank, ""], one.start, one.end, _COLOURS[one.phase])
    for event in calls:
        _call(axes, rows, event)
    by_number = {event.number: event for event in calls}
    for event in calls:
        if event.origin in by_number:
            _arrow(axes, rows, by_number[event.origin], event)
    names = [f"rank {rank}, {f'on {axis}' if axis else 'work'}" for rank, axis in rows]
    axes.set_yticks(list(rows.values()), names)
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def _bar(axes: Axes, row: int, start: float, end: float, colour: str) -> None:
    axes.broken_barh(
        [(1e3 * start, 1e3 * (end - start))],
        (row - _HEIGHT / 2, _HEIGHT),
        facecolors=colour,
        edgecolors="white",
        linewidth=0.5,
    )


def _call(axes: Axes, rows: dict[Row, int], event: Event) -> None:
    if event.start is not None and event.end is not None:
        _bar(axes, rows[event.rank, event.axis], event.start, event.end, _PALE[event.phase])
    here = rows[event.rank, ""]
    if event.stood is not None and event.waited > 0:
        _bar(axes, here, event.stood, event.stood + event.waited, _WAITS)
    if event.stood != event.called:
        axes.plot(
            1e3 * event.called, here + _HEIGHT / 2, marker="v", color="#444444", markersize=4, clip_on=False
        )


def _arrow(axes: Axes, rows: dict[Row, int], forward: Event, backward: Event) -> None:
    if forward.end is None or backward.start is None:
        return
    row = rows[forward.rank, forward.axis]
    axes.add_patch(
        FancyArrowPatch(
            (1e3 * forward.end, row),
            (1e3 * backward.start, rows[backward.rank, backward.axis]),
            connectionstyle="arc3,rad=0.05",
            arrowstyle="-|>",
            mutation_scale=7,
            linewidth=0.6,
            color="#444444",
            alpha=0.7,
        )
    )


def _legend() -> list[Patch]:
    return [
        Patch(color=_COLOURS["forward"], label="forward computation"),
        Patch(color=_COLOURS["backward"], label="backward computation"),
        Patch(color=_WAITS, label="wait"),
        Patch(color=_PALE["forward"], label="forward transfer"),
        Patch(color=_PALE["backward"], label="backward transfer (arrow from its forward call)"),
    ]
