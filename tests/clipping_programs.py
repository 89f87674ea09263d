"""Models that mix every way to hold parameters, with gradients of a dense model, for the tests of gradient clipping."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm

Owned = Callable[[Tensor, str], Tensor]
"""What this rank has of a dense tensor, by the name of its parameter."""

KINDS = (
    "pair",
    "vocabulary",
    "plain",
    "tied",
    "frozen",
    "experts",
    "by hand",
    "DTensor",
    "fully_shard",
    "fully_shard of a pair",
    "DDP of a pair",
)


@dataclass(frozen=True)
class Program:
    """What one program does.

    Attributes:
        seed: of the values.
        dp, tp: the mesh.
        kinds: how each part of the model is held.
        dtypes: of each part.
        norm_type: the exponent.
        limit: the largest norm.
        whole: whether the module is passed, and not its parameters.
    """

    seed: int
    dp: int
    tp: int
    kinds: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    norm_type: float
    limit: float
    whole: bool

    @property
    def exact(self) -> bool:
        """Whether all of it is in double precision."""
        return torch.float32 not in self.dtypes


def random_program(seed: int, ranks: int) -> Program:
    """A program drawn from a seed."""
    draw = random.Random(seed)
    dp = draw.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    kinds = tuple(draw.choice(KINDS) for _ in range(draw.randint(1, 6)))
    plain = {"plain", "by hand", "DTensor", "tied"}
    dtypes = tuple(
        draw.choice([torch.float64, torch.float32, torch.complex128])
        if kind in plain
        else draw.choice([torch.float64, torch.float64, torch.float32])
        for kind in kinds
    )
    several = {"DTensor", "fully_shard of a pair"}
    exponents = [2.0, 2.0, 1.0, 3.0, math.inf, 0.5] + ([0.0] if not several & set(kinds) else [])
    return Program(
        seed, dp, ranks // dp, kinds, dtypes, draw.choice(exponents), draw.choice([0.1, 5.0, 1e4]), draw.random() < 0.5
    )  # fmt: skip


class Experts(nn.Module):
    """Experts of one process."""

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({str(each): nn.Linear(2, 3, dtype=dtype) for each in range(number)})


def dense_parts(program: Program) -> list[nn.Module]:
    """The parts of the dense model, with gradients."""
    draw, parts = random.Random(program.seed), list[nn.Module]()
    for kind, dtype in zip(program.kinds, program.dtypes, strict=True):
        width = draw.choice([1, 3, 6])
        part: nn.Module
        if "pair" in kind:
            part = nn.Sequential(nn.Linear(2, width, dtype=dtype), nn.Linear(width, 3, dtype=dtype))
        elif kind == "vocabulary":
            part = nn.Sequential(nn.Embedding(width, 2, dtype=dtype))
        elif kind == "experts":
            part = Experts(width, dtype)
        else:
            part = nn.Sequential(nn.Linear(width, 2, dtype=dtype), nn.Linear(width, 2, dtype=dtype))
            if kind == "tied":
                part[1].weight = part[0].weight
        parts.append(part)
    values = torch.Generator().manual_seed(program.seed)
    for kind, part in zip(program.kinds, parts, strict=True):
        for number, each in enumerate(part.parameters()):
            each.data = torch.randn(each.shape, generator=values, dtype=each.dtype)
            if kind == "frozen" and number % 2 == 0:
                each.requires_grad_(False)
            elif draw.random() < 0.1:  # as of an expert without tokens
                each.grad = torch.zeros_like(each)
            else:
                each.grad = torch.randn(each.shape, generator=values, dtype=each.dtype)
    return parts


def held(kind: str, dense: nn.Module, mesh: Any, draw: random.Random) -> tuple[nn.Module, Owned]:
    """A part as this rank holds it, with its gradients, and what it holds of a dense tensor of a name."""
    over = draw.choice(["dp", "tp"])
    axis, pieces = gm.axis(over), draw.random()
    part = copy.deepcopy(dense)
    if "pair" in kind or kind == "vocabulary":
        styles: Any = {"0": "vocab"} if kind == "vocabulary" else {"0": "column", "1": "row"}
        gm.nn.tensor_parallel(part, styles, "tp")
        layers: Any = dict(part.named_modules())

        def cut(x: Tensor, name: str) -> Tensor:
            room, _, last = name.rpartition(".")
            found = layers[room].cuts.get(last)
            return x if found is None else found.part(x, gm.rank("tp"))

        made: nn.Module = copy.deepcopy(part)
        if kind == "DDP of a pair":
            made = DistributedDataParallel(made, process_group=gm.axis("dp").group)
            return made, lambda x, name: cut(x, name.removeprefix("module."))
        if kind.startswith("fully_shard"):
            fully_shard(made, mesh=mesh["dp"])
            return made, lambda x, name: distribute_tensor(
                cut(x, name), mesh["dp"], [Shard(0)], src_data_rank=None
            )
        return made, cut
    if kind == "experts":
        experts: Any = dense.experts
        layer = gm.nn.ExpertParallel(
            nn.Identity(), lambda each: copy.deepcopy(experts[str(each)]), len(experts), 1, over
        )
        return layer, lambda x, name: x
    if kind == "by hand":
        for each in part.parameters():
            own = axis.slice(each.shape[0])
            each.data = each.detach()[own].clone()
            gm.nn.mark_sharded(each, over)
        return part, lambda x, name: x[axis.slice(x.shape[0])].clone()
    if kind == "DTensor":
        options = [Shard(0), Replicate()]
        chosen = [options[int(pieces < 0.6)], options[int(0.3 < pieces < 0.8)]]

        def distributed(x: Tensor) -> DTensor:
            return distribute_tensor(x, mesh, chosen, src_data_rank=None)

        for module in part.children():
            for name, each in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(distributed(each.detach())))
        return part, lambda x, name: distributed(x)
    if kind == "fully_shard":
        fully_shard(part, mesh=mesh["dp"])
        return part, lambda x, name: distribute_tensor(x, mesh["dp"], [Shard(0)], src_data_rank=None)
    return part, lambda x, name: x


def local(x: Any) -> Tensor:
    found: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return found.detach()


def clipped(program: Program) -> tuple[float, float, float, float, int]:
    """On a rank: the norm that it gets, the dense one, the relative difference of the largest gradient, the factor."""
    mesh = gm.mesh(dp=program.dp, tp=program.tp)
    dense = dense_parts(program)
    draw, parts, expected = random.Random(-program.seed), nn.ModuleList(), list[tuple[Any, Any, Any]]()
    for kind, whole in zip(program.kinds, dense, strict=True):
        part, own = held(kind, whole, mesh, draw)
        grads: Any = dict(whole.named_parameters())
        for name, each in part.named_parameters():
            source = grads[name.removeprefix("module.")]
            if source.grad is None:
                each.requires_grad_(False)
                continue
            each.grad = own(source.grad.clone(), name)
            if kind == "experts" and not source.grad.any():
                each.grad = None
            elif kind == "experts":
                each.grad = source.grad.clone()
            expected.append((each, source, (own, name)))
        parts.append(part)
    theirs = nn.ModuleList(dense)
    right = torch.nn.utils.clip_grad_norm_(theirs.parameters(), program.limit, program.norm_type)
    found = gm.nn.clip_grad_norm_(
        parts if program.whole else parts.parameters(), program.limit, program.norm_type
    )
    apart = 0.0
    for each, source, (own, name) in expected:
        if each.grad is None:
            continue
        wanted = local(own(source.grad.clone(), name))
        if wanted.numel():
            apart = max(
                apart, float((local(each.grad) - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))
            )
    return found.item(), right.item(), apart, (program.limit / (found + 1e-6)).item(), len(expected)
