"""A picture of a program's types: its lines, coloured by the type of what they make, and what goes between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from gradmesh.checker.findings import Finding
from gradmesh.checker.lines import Line

_COLOURS = {"V": "#56B4E9", "R": "#F0E442", "I": "#009E73", "P": "#E69F00"}
_READS = {
    "V": "V varying: each rank has its own",
    "R": "R replicated: the same, used differently",
    "I": "I invariant: the same, the same work",
    "P": "P partial: a sum still to be taken",
}


def drawn(lines: Sequence[Line], findings: Sequence[Finding], title: str) -> Figure:
    """The picture; lines that a finding points at have a red edge."""
    marked = {
        str(place) for finding in findings for place in (finding.at, finding.began) if place is not None
    }
    shown = list(lines)[:60]
    height = 0.42 * len(shown) + 1.6
    figure = Figure(figsize=(11, height), dpi=130)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, 11), ylim=(height, 0))
    axes.axis("off")
    axes.text(0.2, 0.35, title, fontsize=11, weight="bold", va="center")
    for at, (letter, reads) in enumerate(_READS.items()):
        left = 0.2 + at * 2.7
        axes.add_patch(
            FancyBboxPatch((left, 0.68), 0.18, 0.18, boxstyle="round,pad=0.02", color=_COLOURS[letter])
        )
        axes.text(left + 0.3, 0.78, reads, fontsize=7.5, va="center")
    for at, line in enumerate(shown):
        top, place = 1.15 + 0.42 * at, line.place
        edge = "#C00000" if str(place) in marked else _COLOURS[line.type.value]
        box = FancyBboxPatch(
            (2.4, top),
            8.3,
            0.28,
            boxstyle="round,pad=0.03",
            facecolor=_COLOURS[line.type.value] + "66",
            edgecolor=edge,
            linewidth=2.2 if str(place) in marked else 0.8,
        )
        axes.add_patch(box)
        text = place.text if len(place.text) < 92 else place.text[:89] + "..."
        axes.text(2.5, top + 0.15, text, fontsize=7.5, family="monospace", va="center")
        axes.text(10.6, top + 0.15, line.type.value, fontsize=9, weight="bold", va="center", ha="right")
        name = f"{Path(place.file).name}:{place.line}"
        axes.text(2.3, top + 0.15, name, fontsize=6.5, va="center", ha="right", color="#555555")
        for source in line.takes:
            if source >= len(shown) or source == at:
                continue
            bend = min(0.9, 0.18 + 0.05 * abs(at - source))
            axes.add_patch(
                FancyArrowPatch(
                    (2.38, 1.29 + 0.42 * source), (2.38, top + 0.14), arrowstyle="-|>", mutation_scale=7,
                    connectionstyle=f"arc3,rad={bend if source < at else -bend}", color="#999999", linewidth=0.7,
                )
            )  # fmt: skip
        if line.sends:
            axes.text(10.2, top + 0.15, line.sends, fontsize=7, va="center", ha="right", style="italic")
    if len(lines) > len(shown):
        axes.text(2.4, height - 0.15, f"and {len(lines) - len(shown)} more lines", fontsize=7.5, va="center")
    return figure
