"""The command that prints what is sent with and without `gm.no_sync`, and writes its page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tools.no_sync import MICRO_BATCHES, MODELS, counted, deviation


def table() -> str:
    """What is sent, in Markdown."""
    lines = [
        "| parameters | micro-batches | messages without | with | bytes without | with | with / without | deviation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for k in MICRO_BATCHES:
            (many, much, plain), (few, little, ours) = counted(model, k, False), counted(model, k, True)
            lines.append(
                f"| {model} | {k} | {many} | {few} | {much:,} | {little:,} | {little / much:.4f} | "
                f"{deviation(ours, plain):.0e} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] = (), into: Path | None = None) -> int:
    """Count what accumulation sends with and without `gm.no_sync`; print it, or write it into the page."""
    text = table()
    print(text)
    if into is not None:
        above, _, _ = into.read_text().rpartition("\n| parameters |")
        into.write_text(f"{above}\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
