"""The command that prints what is sent with and without `gm.no_sync`, and writes its page."""

from __future__ import annotations

from pathlib import Path

import click

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


@click.command(help="Count what accumulation sends with and without gm.no_sync.")
@click.option(
    "--write", type=click.Path(dir_okay=False, path_type=Path), help="The page whose table to write."
)
def main(write: Path | None) -> None:
    """Print the table."""
    text = table()
    print(text)
    if write is not None:
        above, _, _ = write.read_text().rpartition("\n| parameters |")
        write.write_text(f"{above}\n{text}\n")


if __name__ == "__main__":
    main()
