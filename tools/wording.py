"""Fail on words that readers do not search for, and name the word to use: `python -m tools.wording [PATH ...]`.

A line that needs one of them, such as a quotation, ends in a comment with `wording: ok`. Attributes, as in `x.begun`,
are skipped.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

INSTEAD = {
    r"told|untold": "passed, given, detected, reported (whichever it is)",
    r"begun(?!:)": "started, pending, async",
    r"owed|owes": "deferred; expected of",
    r"nobody|somebody|whoever|anyone's|nobody's": "no rank, user code, the caller, anyone who",
    r"mends?(?!:)|mended|mending": "fix",
    r"without a word": "silently",
    r"the own": "the local slice, rows, shard",
    r"hears? (?:of|from)|heard (?:of|from)": "receives, is notified",
    r"held against|hold against": "compared with",
    r"(?<!there )(?:is|are|was|were) no (?!longer\b|more\b|less\b|match\b|such\b)\w+": "is not a ...; must be ...",
    r"puts? off|putting off": "defer",
    r"superfluous": "replaces, unnecessary",
    r"go(?:es)? (?:its|their) own way|go(?:es)? on alike": "diverges; does identical work",
    r"errands?|couriers?|followers?|ledgers?": "task; communication thread; tracer; deferred reductions",
    r"of one's own": "custom, user-defined",
    r"of which (?:nobody|none|nothing)": "(rephrase)",
}

PATHS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "src", "tools", "examples", "benchmarks")
_SKIPPED = ("tools/wording.py",)
_SUFFIXES = {".md", ".py", ".rst", ".toml"}
_RULES = {
    re.compile(rf"(?<![\w`.-])(?:{words})(?![\w`-])", re.IGNORECASE): instead
    for words, instead in INSTEAD.items()
}


def findings(text: str) -> list[tuple[int, str, str]]:
    """The words to replace in a text: line number, word, what to use instead.

    >>> findings("The sum is begun here.")
    [(1, 'begun', 'started, pending, async')]
    """
    return [
        (number, found[0], instead)
        for number, line in enumerate(text.splitlines(), 1)
        if "wording: ok" not in line
        for rule, instead in _RULES.items()
        for found in rule.finditer(line)
    ]


def _files(paths: list[str]) -> list[Path]:
    every = (
        found for path in paths for found in ([Path(path)] if Path(path).is_file() else Path(path).rglob("*"))
    )
    return sorted(f for f in every if f.suffix in _SUFFIXES and str(f) not in _SKIPPED)


if __name__ == "__main__":
    lines = [
        f"{file}:{number}: {word!r}: {instead}"
        for file in _files(sys.argv[1:] or list(PATHS))
        for number, word, instead in findings(file.read_text())
    ]
    print("\n".join(lines) or "no finding")
    sys.exit(bool(lines))
