"""Merges the lines of several ranks into one output stream: each line is complete and starts with its rank.

Text is buffered until its line is complete. A carriage return also completes a line, because progress bars start or
end each update with one. The update is written with its carriage return and overwritten by the next text, as on a
terminal with a single writer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TextIO

__all__ = ["LineSplitter", "Screen", "prefixes"]

# A return at the end of the text may be the first half of "\r\n".
_END = re.compile(r"(\r\n|\n|\r(?!\Z))")


def prefixes(size: int, prefix: bool | None) -> list[str] | None:
    """The line prefix of each rank, or None to pass the output of a single rank on unchanged.

    >>> prefixes(2, None), prefixes(2, False), prefixes(1, None)
    (['[rank 0] ', '[rank 1] '], ['', ''], None)
    """
    if size == 1 and not prefix:
        return None
    return ["" if prefix is False else f"[rank {rank}] " for rank in range(size)]


class LineSplitter:
    r"""Splits text that arrives in pieces into lines, each with its end-of-line character.

    >>> lines = LineSplitter()
    >>> lines.feed("one\ntw"), lines.feed("o\r"), lines.feed("three\n"), lines.feed("four")
    ([('one', '\n')], [], [('two', '\r'), ('three', '\n')], [])
    >>> lines.rest()
    [('four', '\n')]
    """

    def __init__(self) -> None:
        self._held: list[str] = []  # joined once, since a long line may arrive in many pieces

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Add a piece of text, and return the lines that it completes."""
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
        """Return the incomplete line, if any, and clear it."""
        text = "".join(self._held)
        self._held = []
        if text.endswith("\r"):
            return [(text[:-1], "\r")]
        return [(text, "\n")] if text else []


class Screen:
    """An output stream of this process that shows lines of ranks.

    Args:
        stream: returns the stream; called at each write, so that a replaced stream is used.
    """

    def __init__(self, stream: Callable[[], TextIO | None]) -> None:
        self._stream = stream
        self._covered = 0  # the length of the text to overwrite after a carriage return

    def show(self, prefix: str, lines: Iterable[tuple[str, str]]) -> None:
        """Write lines of one rank with a single write."""
        self.write("".join(self._shown(prefix, line, end) for line, end in lines))

    def finish(self) -> None:
        """Start a new line if the current one shows a progress bar."""
        if self._covered:
            self._covered = 0
            self.write("\n")

    def write(self, text: str) -> None:
        """Write text unchanged, with escapes for characters that the stream cannot encode."""
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
            return ""  # most progress bars start with a carriage return
        clears = end == "\r" and line.isspace()
        text = "" if clears else prefix + line if line else prefix.rstrip()
        covered, self._covered = self._covered, len(text) if end == "\r" else 0
        if clears and not covered:
            return ""
        return text.ljust(covered) + end
