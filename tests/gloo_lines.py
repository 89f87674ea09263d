"""The lines that Gloo prints up to torch 2.10 where ranks connect, taken out of what a program printed."""

from __future__ import annotations

import re

_LINE = re.compile(r"^(?:\[rank \d+\] )?\[Gloo\] Rank \d+ is connected to .*\n", re.MULTILINE)


def without_gloo_lines(printed: str) -> str:
    """The text without them; later torch prints none."""
    return _LINE.sub("", printed)
