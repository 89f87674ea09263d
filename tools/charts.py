"""Charts of the docs: SVG whose text stays text, with colours for a light and for a dark page."""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

WIDTH = 4.9
"""Inches. A chart this wide shows its text at two thirds of its size on a phone, and at full size elsewhere."""

_THEME = """<style>
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 !important }
  [style*="fill: #ffffff"] { fill: #1b1f24 !important }
  [style*="stroke: #000000"] { stroke: #e6edf3 !important }
  [style*="stroke: #0072b2"] { stroke: #4aa3e8 !important }
  [style*="fill: #0072b2"] { fill: #4aa3e8 !important }
}
</style>
"""


def save(figure: Figure, path: Path, title: str) -> None:
    """Write a figure as SVG."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gradmesh"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    _, tag, body = text.getvalue().partition("<svg ")
    opening, end, rest = body.partition(">")
    rest = re.sub(r"\n\s+", "\n", re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL))
    path.write_text(f'{tag}role="img" {opening}{end}\n<title>{title}</title>\n{_THEME}{rest.lstrip()}')
