"""Check the training loops, losses and layers of other libraries.

$ python -m tools.libraries                          # all; eight minutes on two cores, and the environment
$ python -m tools.libraries --only trl open_clip     # these libraries
$ python -m tools.libraries --environments FOLDER    # where the environment is, or is made
$ python -m tools.libraries --page                   # the page alone, of what was measured
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.models.__main__ import with_row
from tools.models.cells import Cell, Row, row_of
from tools.models.environments import ROOT, TORCH, Environment
from tools.models.parity import parity
from tools.pages import END, mark, parser_of, table

HERE = Path(__file__).parent
PACKAGES = HERE / "requirements.txt"
DATA, PAGE = ROOT / "docs/reports/libraries.json", ROOT / "docs/libraries.md"
ALONE = HERE / "without_dependencies.txt"
RELEASES = dict(re.findall(r"^([\w-]+)==(.+)$", PACKAGES.read_text() + ALONE.read_text(), re.MULTILINE))
RANKS = 2
_LIMIT = 300.0

PROGRAMS: dict[str, tuple[str, dict[str, str]]] = {
    "accelerate": (
        "accelerate_loop",
        {"ddp": "the guide's loop over uneven batches, DDP", "fsdp2": "the same, FSDP2"},
    ),
    "deepspeed": (
        "deepspeed_engine",
        {stage: f"ZeRO stage {stage}, two micro-batches, clipped" for stage in "0123"},
    ),
    "fairchem-core": (
        "fairchem_graph_parallel",
        {
            "allgather": "eSCN-MD, energies and forces, graph parallel by all-gather",
            "all_to_all": "the same, by all-to-all",
        },
    ),
    "lightly": (
        "lightly_losses",
        {
            name: name
            for name in (
                "NTXentLoss",
                "DCLLoss",
                "VICRegLoss",
                "BarlowTwinsLoss",
                "TiCoLoss",
                "SwaVLoss",
                "MSNLoss",
            )
        },
    ),
    "lightning": ("fabric_loop", {"ddp": "Fabric, DDP, two micro-batches, clipped"}),
    "pytorch-lightning": ("lightning_trainer", {"ddp": "Trainer, DDP, two micro-batches, clipped"}),
    "megatron-core": (
        "megatron_layers",
        {"tensor-parallel": "layers and cross entropy", "sequence-parallel": "the same, sequence parallel"},
    ),
    "open_clip_torch": (
        "open_clip_loss",
        {
            "clip": "ClipLoss as by default",
            "clip-local": "ClipLoss, local_loss",
            "clip-grad": "ClipLoss, gather_with_grad",
            "clip-local-grad": "ClipLoss, local_loss and gather_with_grad",
            "siglip": "SigLipLoss, shifted",
            "siglip-gather": "SigLipLoss, gathered",
        },
    ),
    "peft": ("peft_adapters", {"lora": "LoRA, DDP", "dora": "DoRA, DDP", "lora fsdp2": "LoRA, FSDP2"}),
    "torchtitan": (
        "torchtitan_models",
        {
            "fsdp2": "Llama 3, FSDP2",
            "hsdp": "the same, HSDP",
            "tp": "the same, tensor parallel",
            "tp+sp": "the same, tensor and sequence parallel",
            "tp+sp chunked": "the same, loss in parts of the sequence",
            "pp": "the same, pipeline, 1F1B",
            "moe": "Qwen 3 with experts, FSDP2",
            "ep": "the same, expert parallel",
        },
    ),
    "transformers": ("transformers_trainer", {"": "Trainer, uneven texts, two micro-batches"}),
    "trl": (
        "trl_trainers",
        {
            "sft": "SFTTrainer",
            "sft packing": "SFTTrainer, packed",
            "dpo": "DPOTrainer",
            "grpo grpo": "GRPOTrainer, loss_type grpo",
            "grpo bnpo": "GRPOTrainer, loss_type bnpo",
            "grpo dr_grpo": "GRPOTrainer, loss_type dr_grpo",
            "grpo dapo": "GRPOTrainer, loss_type dapo",
        },
    ),
}
"""The program of each library, and its forms by their arguments."""


def cells(only: Sequence[str] = ()) -> Iterator[Cell]:
    """A library, as a family, and a form of its program, as a plan."""
    for library, (_, forms) in PROGRAMS.items():
        if not only or library in only:
            yield from (Cell(RELEASES[library], library, form) for form in forms)


def checked(cell: Cell, environment: Environment, folder: Path) -> Row:
    """Check a form; wrong gradients are compared with those of one process where the program can write them."""
    program = str((HERE / "programs" / f"{PROGRAMS[cell.family][0]}.py").relative_to(ROOT))
    since = time.perf_counter()
    started = environment.start(
        "-m", "gradmesh", "check", "-n", str(RANKS), "--json", program, "--", *cell.plan.split()
    )
    try:
        out, error = started.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        started.terminate()
        started.communicate()
        return Row(cell, "unchecked", _LIMIT, error=f"not over after {_LIMIT:g} seconds")
    row = row_of(cell, out, error, time.perf_counter() - since)
    row.notes = [re.sub(r"\S*/site-packages/", "", note) for note in row.notes]
    if row.verdict == "wrong" and cell.family == "open_clip_torch":
        row.parity = parity(environment, (program, *cell.plan.split()), RANKS, folder)
    return row


def page(data: dict[str, Any]) -> str:
    """The page."""
    rows = data["rows"]
    parts = [
        "# Training libraries",
        mark("docs/libraries.md"),
        "`gradmesh check` on what training libraries compute on several ranks: tiny models with random weights, two "
        "steps on two local ranks over Gloo, texts and batches of different lengths where a loop takes them. The "
        f"programs are in `tools/libraries/programs`, the releases are pinned beside them, with torch {data['torch']}.",
        "*Right*: the gradients of both steps were compared with the true ones, and there is no error. Where a wrong "
        "one is *confirmed*, the gradients also differ from those of one process. The time is that of the whole check.",
        table("library | what | verdict | seconds", [_line(row) for row in rows]),
    ]
    said = [line for row in rows for line in _details(row)]
    parts += ["## What was found", "\n".join(said)] if said else []
    parts.append(
        "Of torchtitan's backends `partial_dtensor` is checked: its default, `spmd_types`, needs a newer torch, "
        "and its context parallelism needs a GPU. All findings and notes are in "
        "[libraries.json](reports/libraries.json). Repeat it with `python -m tools.libraries`, some with `--only trl`. "
        "A finding as it can be reported: [a contrastive loss](models/clip-loss.md)."
    )
    return "\n\n".join([*parts, END]) + "\n"


def _line(row: dict[str, Any]) -> list[str]:
    what = PROGRAMS[row["family"]][1][row["plan"]]
    rules = sorted({each["rule"] for each in row["findings"]})
    said = {"unchecked": "not checked"}.get(row["verdict"], row["verdict"])
    if row["verdict"] == "wrong":
        sure = "confirmed" if row["parity"] and row["parity"]["wrong"] else "not confirmed"
        said = f"**wrong** {', '.join(rules)}, {sure}"
    elif rules:
        said += f", warning {', '.join(rules)}"
    return [f"{row['family']} {row['release']}", what, said, f"{row['seconds']:.0f}"]


def _details(row: dict[str, Any]) -> list[str]:
    name = f"{row['family']}, {PROGRAMS[row['family']][1][row['plan']]}"
    if row["verdict"] not in ("right", "wrong"):
        return [f"- {name}: `` {row['error'] or next(iter(row['notes']), 'no note says why')} ``"]
    said = [
        f"- {name}: {each['rule']} at `{each['at']['file']}:{each['at']['line']}`: {each['message']}"
        for each in row["findings"]
    ]
    far = row["parity"] and row["parity"]["far"] is not None and row["parity"]
    if far:
        one, other = far["norms"]
        said[-1] += f". Beside one process: the norm of {far['name']} is {other:.4g} for {one:.4g}"
    return said


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Measure, and write the page."""
    parser = parser_of(__doc__, "python -m tools.libraries")
    parser.add_argument("--only", nargs="+", default=(), choices=PROGRAMS, metavar="LIBRARY")
    parser.add_argument("--environments", type=Path, default=ROOT / "build/models")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args(arguments)
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {"torch": TORCH, "rows": []}
    for cell in () if given.page else cells(given.only):
        environment = Environment("libraries", given.environments, PACKAGES, ALONE)
        row = checked(cell, environment, given.environments)
        print(f"{cell!s:50} {row.verdict:10} {row.seconds:6.1f} s  {row.error[:100]}", flush=True)
        data["rows"] = sorted(
            with_row(data["rows"], row),
            key=lambda each: (each["family"], _place(each["family"], each["plan"])),
        )
        DATA.write_text(json.dumps(data, indent=1) + "\n")
    (into or PAGE).write_text(page(data))
    return 0


def _place(library: str, form: str) -> int:
    return list(PROGRAMS[library][1]).index(form)


if __name__ == "__main__":
    sys.exit(main())
