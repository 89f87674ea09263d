"""Run the tutorials and keep what they print: python -m tools.report docs/tutorials.

By itself it only says which print something else than they hold. What goes to stderr, such as progress bars, is
kept as it last stood and not compared.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "docs" / "tutorials"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CELL = re.compile(r"/[\w/.-]*ipykernel_\d+/\d+\.py")
_SECONDS = re.compile(r"\b\d+\.\d+ (s|GiB)\b")


def notebooks() -> list[Path]:
    """The tutorials."""
    return sorted(FOLDER.glob("*.ipynb"))


def run(path: Path, timeout: int = 120) -> Any:
    """The notebook with what its cells print, run by a fresh kernel in an empty folder; raises what a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    before = os.environ.copy()
    root = Path(__file__).parent.parent
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before.get("PATH", "")])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root / "src"), before.get("PYTHONPATH", "")])
    os.environ.update(PYDEVD_DISABLE_FILE_VALIDATION="1", NO_COLOR="1", COLUMNS="110", OMP_NUM_THREADS="1")
    try:
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=resources)
            client.execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    _tidy(notebook)
    return notebook


def printed(notebook: Any) -> list[str]:
    """What each cell prints and returns, without what goes to stderr, and without times."""
    return [
        _SECONDS.sub(
            "some s",
            "".join(
                output.get("text", "") or output.get("data", {}).get("text/plain", "")
                for output in cell.get("outputs", [])
                if output.get("name") != "stderr"
            ),
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def _tidy(notebook: Any) -> None:
    """Leave out of a notebook what differs from run to run."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python", "pygments_lexer": "ipython3"},
        }
    )
    for number, cell in enumerate(notebook.cells):
        cell["id"], cell["metadata"] = f"cell-{number}", {}
        if cell.cell_type != "code":
            continue
        streams: dict[str, Any] = {}
        kept = []
        for output in cell.outputs:
            if output.output_type != "stream":
                kept.append(output)
            elif output.name in streams:
                streams[output.name].text += output.text
            else:
                streams[output.name] = output
                kept.append(output)
        for output in streams.values():
            output.text = _as_last_seen(_CELL.sub("<a cell>", _COLOURS.sub("", output.text)))
        cell.outputs = [output for output in kept if output.get("text") != ""]


def _as_last_seen(text: str) -> str:
    """The lines of a terminal after carriage returns; of the states of a progress bar the last one."""
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")]
    bars = [bool(re.search(r"\d+/\d+ \|", line)) for line in lines]
    last = max((at for at, bar in enumerate(bars) if bar), default=-1)
    return "\n".join(line for at, line in enumerate(lines) if not bars[at] or at == last)


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Run them, and write them or say which are not up to date."""
    stale = 0
    for path in notebooks():
        fresh = run(path)
        if into is not None:
            nbformat.write(fresh, into / path.name)
        elif printed(fresh) != printed(nbformat.read(path, as_version=4)):
            print(f"{path} is not up to date")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
