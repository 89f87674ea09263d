"""Write what is generated into README.md, pages in docs/ and the badges; `--check` asks whether they are fresh."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from gradmesh._torch import fsdp as _fsdp  # noqa: F401  # registers its names
from gradmesh._torch.names import RELIED_ON, RELIED_ON_LATER
from gradmesh._util import environment
from gradmesh.ops.registry import table
from tools import gpu

ROOT = Path(__file__).parent.parent
WIDTH = 6.6
"""Of a letter."""

PATTERN = """<svg xmlns="http://www.w3.org/2000/svg" width="{whole:.0f}" height="20" role="img"
aria-label="{name}: {text}">
<clipPath id="c"><rect width="{whole:.0f}" height="20" rx="3"/></clipPath>
<g clip-path="url(#c)"><rect width="{left:.0f}" height="20" fill="#4a5160"/>
<rect x="{left:.0f}" width="{right:.0f}" height="20" fill="#2b6cb0"/></g>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{at:.0f}" y="14">{name}</text><text x="{other:.0f}" y="14">{text}</text></g></svg>
"""


def badges() -> dict[str, str]:
    """The files, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    kinds = [line.split(" :: ") for line in project["classifiers"]]
    pythons = [kind[-1] for kind in kinds if kind[:2] == ["Programming Language", "Python"]]
    (torch,) = (line for line in project["dependencies"] if line.startswith("torch"))
    badge_texts = {
        "python": " | ".join(pythons),
        "torch": torch.removeprefix("torch>=") + " or later",
        "license": project["license"],
        "types": "checked" if ["Typing", "Typed"] in kinds else "none",
    }
    return {f"{name}.svg": _badge(name, text) for name, text in badge_texts.items()}


def _badge(name: str, text: str) -> str:
    left, right = (WIDTH * len(words) + 12 for words in (name, text))
    return PATTERN.format(
        name=name, text=text, left=left, right=right, whole=left + right, at=left / 2, other=left + right / 2
    )


README = ROOT / "README.md"
VERSIONS, VARIABLES = ROOT / "docs" / "versions.md", ROOT / "docs" / "launch.md"
MODES = ROOT / "docs" / "reports" / "modes.md"
GPUS, STATUS = ROOT / "docs" / "gpus.md", ("<!-- status: begin (make gpu) -->", "<!-- status: end -->")
OTHERS = "<!-- modes: begin (make docs) -->", "<!-- modes: end -->"
BEGIN, END = "<!-- table: begin (make docs) -->", "<!-- table: end -->"


def _between_marks(text: str, generated: str, begin: str = BEGIN, end: str = END) -> str:
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{generated}\n{end}{after}"


def with_table(text: str) -> str:
    """The text with the table of ops between its marks, and the one of other systems as it was measured."""
    measured = MODES.read_text().split("## Summary\n\n")[1].split("\n\n")[0]
    return with_status(_between_marks(_between_marks(text, table()), measured, *OTHERS), "docs/")


def with_status(text: str, folder: str = "") -> str:
    """The text with what was run on which device between its marks."""
    return _between_marks(text, gpu.table(gpu.results()).replace("](", f"]({folder}"), *STATUS)


def with_names(text: str) -> str:
    """The text with the private names of torch between its marks, and what happens without each."""
    names: dict[str, list[str]] = {}
    for path, without in {**RELIED_ON, **RELIED_ON_LATER}.items():
        names.setdefault(without, []).append(f"`{path}`")
    rows = [f"| {'<br>'.join(paths)} | {without} |" for without, paths in names.items()]
    return _between_marks(text, "\n".join(["| without | what happens |", "|---|---|", *rows]))


def with_variables(text: str) -> str:
    """The text with the environment variables between its marks."""
    return _between_marks(text, environment.table())


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Update all pages, or check them."""
    check = "--check" in (sys.argv if arguments is None else arguments)
    stale = 0
    for page, generated in (
        (README, with_table),
        (VERSIONS, with_names),
        (VARIABLES, with_variables),
        (GPUS, with_status),
    ):
        text = page.read_text()
        fresh = generated(text)
        stale |= text != fresh
        if not check:
            page.write_text(fresh)
    for name, fresh in badges().items():
        path = ROOT / "docs" / "badges" / name
        stale |= not path.exists() or path.read_text() != fresh
        if not check:
            path.write_text(fresh)
    return int(stale and check)


if __name__ == "__main__":
    sys.exit(main())
