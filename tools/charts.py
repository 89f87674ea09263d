"""Charts of the docs: SVG whose text stays text, with colours for a light and for a dark page."""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

WIDTH = 4.9
"""Inches. A chart this wide shows its text at two thirds of its size on a phone, and at full size elsewhere."""

_ON_DARK = {
    "#000000": "#e6edf3",
    "#ffffff": "#1b1f24",
    "#444444": "#c9d1d9",
    "#0072b2": "#4aa3e8",
    "#1f77b4": "#5fa8dd",
    "#9fcbe6": "#34627f",
    "#f2be98": "#8a5433",
    "#dddddd": "#5b626b",
    "#c00000": "#ff6b6b",
}
"""The colours that a dark page needs in place of those for a light one; others serve both."""

_RULES = "\n".join(
    f'  [style*="{name}: {light}"] {{ {name}: {dark} !important }}'
    for light, dark in _ON_DARK.items()
    for name in ("fill", "stroke")
)
_THEME = f"""<style>
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e6edf3 !important }}
{_RULES}
}}
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
