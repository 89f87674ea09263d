"""Gradients of a parallel model beside those of the same model in one process."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradmesh.launch.process_ranks import held_port
from tools.models.environments import Environment

_LIMIT = 300.0
_FAR = 1e-3
_NOTHING = 1e-5


@dataclass(frozen=True)
class Parity:
    """How far gradients are from those of one process.

    Attributes:
        far: the largest difference of an entry, beside the largest entry of that parameter's gradient; None where there
            is nothing to compare.
        name: of the parameter.
        norms: of its gradient in one process, and on the rank that is farthest.
        error: why the ranks gave none.
    """

    far: float | None
    name: str = ""
    norms: tuple[float, float] = (0.0, 0.0)
    error: str = ""

    @property
    def wrong(self) -> bool:
        """Whether that is more than rounding."""
        return self.far is not None and self.far > _FAR


def parity(environment: Environment, arguments: Sequence[str], ranks: int, into: Path) -> Parity:
    """Run a program, which writes gradients to the file that it is given, in one process and on ranks, and compare."""
    files = [into / f"gradients-{rank}.pt" for rank in range(-1, ranks)]
    for file in files:
        file.unlink(missing_ok=True)
    with held_port() as port:
        started = [environment.start(*arguments, str(files[0]))]
        started += [
            environment.start(
                *arguments,
                str(file),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            for rank, file in enumerate(files[1:])
        ]
        try:
            said = [each.communicate(timeout=_LIMIT)[1] for each in started]
        except subprocess.TimeoutExpired:
            return Parity(None, error=f"not over after {_LIMIT:g} seconds")
        finally:
            for each in started:
                each.kill()
    if not all(file.exists() for file in files):
        last = next((text for text in said if text.strip()), "no gradients were written")
        return Parity(None, error=last.strip().splitlines()[-1])
    true, *others = [torch.load(file) for file in files]
    return max((difference(true, other) for other in others), key=lambda each: each.far or 0.0)


def difference(true: dict[str, Tensor], other: dict[str, Tensor]) -> Parity:
    """The parameter whose gradient is farthest."""
    rows, floor = [], _NOTHING * max(float(x.abs().max()) for x in true.values())
    for name, x in true.items():
        y = other.get(name)
        if y is None or y.shape != x.shape:
            return Parity(None, name, error=f"{name} is not there in the same shape")
        scale = max(float(x.abs().max()), floor)
        rows.append(Parity(float((x - y).abs().max()) / scale, name, (float(x.norm()), float(y.norm()))))
    return max(rows, key=lambda each: each.far or 0.0)
