"""Run gm.objective in the training loops of other libraries, and compare the weights with those of one process.

$ python -m tools.loops                          # all; five minutes on two cores, and the environment
$ python -m tools.loops --only trl_sft           # these programs of examples/loops
$ python -m tools.loops --environments FOLDER    # where the environment of tools.libraries is, or is made
$ python -m tools.loops --page                   # the table alone, of what was measured

Each loop takes two steps of two micro-batches, on two ranks over Gloo and in one process. The reference is plain torch
in one process: all rows of a step in one batch, one mean over its labels.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tools.models.environments import ROOT, TORCH, Environment
from tools.pages import mark, parser_of, put, table

HERE = ROOT / "examples/loops"
PAGE, DATA = ROOT / "docs/loops.md", ROOT / "docs/reports/loops.json"
PACKAGES, ALONE = (
    ROOT / "tools/libraries" / f"{name}.txt" for name in ("requirements", "without_dependencies")
)
_PINNED = re.findall(r"^([\w-]+)(?:\[\w+\])?==(.+)$", PACKAGES.read_text() + ALONE.read_text(), re.MULTILINE)
RELEASES = {**dict(_PINNED), "torch": TORCH}
RANKS, MOST_LINES, _LIMIT = 2, 60, 200.0


class Loop(NamedTuple):
    """A program of `examples/loops`, and its arguments behind the path."""

    program: str
    library: str
    what: str
    arguments: tuple[str, ...] = ()
    model: str = "model"
    counts: bool = (
        False  # whether `--without` is the library's own loss, which counts the tokens of all ranks
    )

    @property
    def name(self) -> str:
        """The program and its arguments."""
        return " ".join((self.program, *self.arguments))

    @property
    def lines(self) -> int:
        """The lines of the program."""
        return len((HERE / f"{self.program}.py").read_text().splitlines())


LOOPS = (
    Loop("ddp_no_sync", "torch", "DDP, `no_sync`"),
    Loop("fsdp2", "torch", "FSDP2"),
    Loop("accelerate_loop", "accelerate", "the guide's loop, `accumulate`"),
    Loop("fabric_loop", "lightning", "Fabric, DDP"),
    Loop("lightning_trainer", "pytorch-lightning", "Trainer, DDP"),
    Loop("transformers_trainer", "transformers", "Trainer", model="language_model"),
    Loop("trl_sft", "trl", "SFTTrainer", model="language_model", counts=True),
    Loop("deepspeed_zero", "deepspeed", "ZeRO stage 1", ("1",)),
    Loop("deepspeed_zero", "deepspeed", "ZeRO stage 2", ("2",)),
    Loop("torchtitan_loss", "torchtitan", "a loss of its own, FSDP2", counts=True),
    Loop("ray_train", "ray", "Train, DDP"),
)
HEADS = "library | loop | 2 ranks | one process | 2 ranks, without `gm.objective` | lines"
# torchvision, whose wheel on the package index needs a build of torch with CUDA, is imported by some: see images.py.
_START = (
    "import images, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def command(python: str, loop: Loop, ranks: int, path: Path, *flags: str) -> list[str]:
    """What runs a loop; rank 0 writes the weights into the path."""
    program = [str(HERE / f"{loop.program}.py"), str(path), *loop.arguments]
    own = [] if loop.library == "torch" else ["-c", _START]
    if loop.library == "ray":
        return [python, *own, *program, str(ranks), *flags]
    started = [python, *own, *program, *flags]
    if ranks == 1 and loop.library != "deepspeed":  # which needs the variables of a launcher
        return started
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, "--no-python", *started]


def weights(python: str, loop: Loop, ranks: int, folder: Path, *flags: str) -> dict[str, Tensor]:
    """The weights after both steps of a loop."""
    path = folder / f"{'-'.join((loop.program, *loop.arguments, str(ranks), *flags))}.pt"
    paths = (ROOT / "src", HERE, ROOT / "tools/libraries/programs")
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    given = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", **quiet}
    done = subprocess.run(
        command(python, loop, ranks, path, *flags),
        cwd=folder,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=_LIMIT,
    )
    if done.returncode:
        raise RuntimeError(f"{loop.name} on {ranks} ranks: {done.stderr[-2000:]}")
    found: dict[str, Tensor] = torch.load(path)
    return found


def dense(name: str) -> dict[str, Tensor]:
    """The weights after both steps in one process: one batch a step, one mean."""
    sys.path.insert(0, str(HERE))
    tiny: dict[str, Any] = runpy.run_path(str(HERE / "tiny.py"))
    model = tiny[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batches in tiny["steps"](0, 1):
        ids, labels = (torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels"))
        logits = model(ids)
        if name == "language_model":
            logits, labels = logits.logits[:, :-1], labels[:, 1:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Tensor] = model.state_dict()
    return found


def furthest(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest relative difference of a parameter, by norms."""
    assert found.keys() == reference.keys()
    return max(float((found[name] - x).norm() / x.norm()) for name, x in reference.items())


def measured(loop: Loop, environment: Environment, folder: Path) -> dict[str, Any]:
    """The row of a loop."""
    python, path = str(environment.python), folder / f"{loop.model}.pt"
    if not path.exists():
        code = f"import images, torch, tools.loops as t; torch.save(t.dense({loop.model!r}), {str(path)!r})"
        paths = os.pathsep.join(str(ROOT / name) for name in ("src", "tools/libraries/programs"))
        started = environment.start("-c", code, PYTHONPATH=paths)
        _, error = started.communicate(timeout=_LIMIT)
        if started.returncode:
            raise RuntimeError(error[-2000:])
    reference = torch.load(path)
    return {
        "loop": loop.name,
        "release": RELEASES[loop.library],
        "ranks": furthest(weights(python, loop, RANKS, folder), reference),
        "one": furthest(weights(python, loop, 1, folder), reference),
        "without": furthest(weights(python, loop, RANKS, folder, "--without"), reference),
    }


def part(rows: Sequence[dict[str, Any]]) -> str:
    """The generated part of the page."""
    by_name = {row["loop"]: row for row in rows}
    return table(HEADS, [_line(loop, by_name[loop.name]) for loop in LOOPS if loop.name in by_name])


def _line(loop: Loop, row: dict[str, Any]) -> list[object]:
    return [
        f"{loop.library} {row['release']}",
        f"[{loop.what}](../examples/loops/{loop.program}.py)",
        *(f"{row[key]:.1e}" for key in ("ranks", "one")),
        f"{row['without']:.1e}" + ", counts by itself" * loop.counts,
        loop.lines,
    ]


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Measure, and write the table into the page."""
    parser = parser_of(__doc__, "python -m tools.loops")
    names = sorted({loop.program for loop in LOOPS})
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--environments", type=Path, default=ROOT / "build/models")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args(arguments)
    rows = {row["loop"]: row for row in (json.loads(DATA.read_text()) if DATA.exists() else [])}
    with TemporaryDirectory() as folder:
        for loop in () if given.page else LOOPS:
            if loop.program in given.only:
                environment = Environment("libraries", given.environments, PACKAGES, ALONE)
                rows[loop.name] = row = measured(loop, environment, Path(folder))
                print(
                    f"{loop.name:24}{row['ranks']:10.1e}{row['one']:10.1e}{row['without']:10.1e}", flush=True
                )
                ordered = [rows[each.name] for each in LOOPS if each.name in rows]
                DATA.write_text(json.dumps(ordered, indent=1) + "\n")
    put(into or PAGE, mark("docs/loops.md"), part(list(rows.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
