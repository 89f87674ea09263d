"""Lines from several ranks on one output stream: each arrives whole, and starts with its rank.

Text is held back until its line is complete. A carriage return completes a line too: progress bars end, or
begin, each of their states with one. Such a state is written with its carriage return, and what is written next
covers it, as on a terminal that only one process writes to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TextIO

__all__ = ["LineSplitter", "Screen", "prefixes"]

# A return at the end of the text may be the first half of "\r\n".
_END = re.compile(r"(\r\n|\n|\r(?!\Z))")


def prefixes(size: int, prefix: bool | None) -> list[str] | None:
    """What the lines of each rank start with, or None where one rank's text passes as it is.

    >>> prefixes(2, None), prefixes(2, False), prefixes(1, None)
    (['[rank 0] ', '[rank 1] '], ['', ''], None)
    """
    if size == 1 and not prefix:
        return None
    return ["" if prefix is False else f"[rank {rank}] " for rank in range(size)]


class LineSplitter:
    r"""Cuts text that arrives in pieces into lines, each with the character that ended it.

    >>> lines = LineSplitter()
    >>> lines.feed("one\ntw"), lines.feed("o\r"), lines.feed("three\n"), lines.feed("four")
    ([('one', '\n')], [], [('two', '\r'), ('three', '\n')], [])
    >>> lines.rest()
    [('four', '\n')]
    """

    def __init__(self) -> None:
        self._held: list[str] = []  # joined only once, as a line may be long and arrive in many pieces

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Take a piece of text, and return the lines that it completes."""
        if self._held and self._held[-1].endswith("\r"):
            text = self._held.pop() + text
        parts = _END.split(text)
        if len(parts) == 1:
            if text:
                self._held.append(text)
            return []
        parts[0] = "".join(self._held) + parts[0]
        self._held = [parts[-1]] if parts[-1] else []
        return [
            (line, "\r" if end == "\r" else "\n") for line, end in zip(parts[:-1:2], parts[1::2], strict=True)
        ]

    def rest(self) -> list[tuple[str, str]]:
        """Return what has not become a whole line, as a line, and forget it."""
        text = "".join(self._held)
        self._held = []
        if text.endswith("\r"):
            return [(text[:-1], "\r")]
        return [(text, "\n")] if text else []


class Screen:
    """An output stream of this process on which ranks show their lines.

    Args:
        stream: gives the stream; called at each write, so that a stream that was replaced is noticed.
    """

    def __init__(self, stream: Callable[[], TextIO | None]) -> None:
        self._stream = stream
        self._covered = 0  # the length of the text that the cursor stands before, after a carriage return

    def show(self, prefix: str, lines: Iterable[tuple[str, str]]) -> None:
        """Write the lines of one rank in one piece."""
        self.write("".join(self._shown(prefix, line, end) for line, end in lines))

    def finish(self) -> None:
        """Move below the state of a progress bar that stands in the current line."""
        if self._covered:
            self._covered = 0
            self.write("\n")

    def write(self, text: str) -> None:
        """Write text as it is, with escapes for characters that the stream cannot encode."""
        stream = self._stream()
        if stream is None or not text:
            return
        try:
            stream.write(text)
        except UnicodeEncodeError as error:
            stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))

    def flush(self) -> None:
        """Flush the stream."""
        stream = self._stream()
        if stream is not None:
            stream.flush()

    def _shown(self, prefix: str, line: str, end: str) -> str:
        if end == "\r" and not line:
            return ""  # most progress bars begin with a return
        clears = end == "\r" and line.isspace()
        text = "" if clears else prefix + line if line else prefix.rstrip()
        covered, self._covered = self._covered, len(text) if end == "\r" else 0
        if clears and not covered:
            return ""
        return text.ljust(covered) + end
