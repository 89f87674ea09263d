"""Badges that say what pyproject.toml says, as files: a page that is read offline shows them, too."""

from __future__ import annotations

import tomllib
from pathlib import Path

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
