"""python -m tools.report docs/pictures: a picture of every verb and of the types, and the page of them.

By itself it only lists outdated files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from gradmesh.ops.registry import table
from gradmesh.runtime.mesh import Axis
from gradmesh.types import Type
from tools.pages import written
from tools.pictures.drawing import picture_of, types_picture
from tools.pictures.motion import drawn, motions

_PAGE = """# Every verb, drawn

Three ranks; on the left what each hands in, on the right what it gets. A colour is a rank's own value, violet is a
value that is the same on every rank, and dashes are zeros. The backward half is the verb's adjoint applied to the
gradient `g` of what came out. Each picture is read off the op's own matrix by
`python -m tools.report docs/pictures`.
"""

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
_NAMES = {"V": "each its own", "R": "used differently", "I": "repeated work", "P": "a pending sum"}


def name_of(call: str) -> str:
    """The file name of a call's picture."""
    return re.sub(r"[^a-z_A-Z]+", "-", call.replace("'", "")).strip("-") + ".svg"


def files() -> dict[str, str]:
    """Every file of the folder as it has to be, by its name."""
    adjoints = {line.split("`")[1]: line.rstrip(" |").rsplit("| ", 1)[1] for line in table().splitlines()[2:]}
    found = {
        "types.svg": types_picture({letter: (_NAMES[letter], Type(letter).dual.value) for letter in "VRIP"})
    }
    page = [_PAGE]
    axis = Axis("any", 0, 3, None)  # type: ignore[arg-type]  # nothing is sent
    moved = motions()
    for row in drawn():
        op = row.examples(axis)[0][0]
        back = adjoints[row.call]
        name = name_of(row.call)
        found[name] = picture_of(row.call, *moved[row.call], (row.forward, back))
        page.append(
            f"## `{row.call}`\n\n`{op.src} -> {op.dst}`: {row.forward}; backward: {back}.\n\n"
            f"![{row.call}: what three ranks hold, forward and backward]({name})\n"
        )
    found["README.md"] = "\n".join(page)
    return found


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Write the files, or say which are not up to date."""
    folder = into or FOLDER
    return written({folder / name: text for name, text in files().items()}, into is not None)


if __name__ == "__main__":
    sys.exit(main())
