"""Random programs of several ranks with hand-written collectives, right ones and ones with a fault of a known kind."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.verify import Input
from gradmesh.verify.gradients import diagnosis as h

__all__ = ["FAULTS", "Spec", "random_spec"]

WIDTH = 2


def summed(x: Tensor) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def sizes_of(x: Tensor) -> list[int]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, x.shape[0])
    return found


class HandGather(torch.autograd.Function):
    """V -> R along dim 0; sizes may differ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: str | None, sizes: list[int]) -> Tensor:
        ctx.fault, ctx.sizes = fault, sizes
        parts = [x.new_empty(n, *x.shape[1:]) for n in sizes]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        fault, rank, ranks = ctx.fault, dist.get_rank(), dist.get_world_size()
        parts = (grad if fault == "own slice" else summed(grad)).split(ctx.sizes)
        mine = parts[(rank + 1) % ranks] if fault == "wrong slice" else parts[rank]
        if fault == "summed again":
            mine = summed(mine)
        if fault == "dropped" and rank == ranks - 1:
            mine = torch.zeros_like(mine)
        if fault == "conjugate":
            mine = mine.conj().resolve_conj()
        scale = {"times W": ranks, "over W": 1 / ranks, "half": 0.5}.get(fault or "", 1)
        if fault == "own share":
            scale = ranks * ctx.sizes[rank] / sum(ctx.sizes)
        return scale * mine.clone(), None, None


class HandReduce(torch.autograd.Function):
    """P -> R."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: str | None) -> Tensor:
        ctx.fault = fault
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.fault == "own slice":
            return grad.clone(), None
        total = summed(grad)
        if ctx.fault == "conjugate":
            total = total.conj().resolve_conj()
        ranks = dist.get_world_size()
        return {"times W": ranks, "over W": 1 / ranks, "half": 0.5}.get(ctx.fault or "", 1) * total, None


class HandCopy(torch.autograd.Function):
    """I -> R."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: str | None) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.fault == "own slice":
            return grad.clone(), None
        total = summed(grad)
        return summed(total) if ctx.fault == "summed again" else total, None


class HandTotal(torch.autograd.Function):
    """P -> I: the loss of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: str | None) -> Tensor:
        ctx.fault = fault
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ranks = dist.get_world_size()
        if ctx.fault == "times W":
            return summed(grad), None
        return grad / ranks if ctx.fault == "over W" else grad.clone(), None


class HandMean(torch.autograd.Function):
    """The mean over all ranks' rows of what each row gives, the same on every rank, counted once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: str | None) -> Tensor:
        rows = summed(torch.tensor([float(len(x))], dtype=torch.float64))
        ctx.fault, ctx.rows, ctx.own = fault, float(rows), len(x)
        return summed(x.sum()) / ctx.rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        local = ctx.fault == "local means"
        weight = 1 / (dist.get_world_size() * ctx.own) if local else 1 / ctx.rows
        return (weight * grad).expand(ctx.own), None


FAULTS: dict[str, tuple[str, ...]] = {
    "own slice": (h.SUM_MISSING,),
    "wrong slice": (h.SLICE,),
    "summed again": (h.TWICE, h.TIMES_W, h.TERM),
    "dropped": (h.DROPPED,),
    "conjugate": (h.CONJUGATE,),
    "times W": (h.TIMES_W, h.TERM),
    "over W": (h.UNDER_W, h.TERM),
    "half": (h.TERM, h.SCALED),
    "own share": (h.MEANS,),
    "local means": (h.MEANS,),
}
"""Each fault and what it may be called. A factor of one collective is one of the whole where all goes through it."""

_WHERE: dict[str, tuple[str, ...]] = {
    "own slice": ("gather", "reduce", "copy"),
    "wrong slice": ("gather",),
    "summed again": ("gather", "copy"),
    "dropped": ("gather",),
    "conjugate": ("gather", "reduce"),
    "times W": ("gather", "reduce", "total"),
    "over W": ("gather", "reduce", "total"),
    "half": ("gather", "reduce"),
    "own share": ("gather",),
    "local means": ("mean",),
}

_NAMES = {
    "gather": "HandGather",
    "reduce": "HandReduce",
    "copy": "HandCopy",
    "total": "HandTotal",
    "mean": "HandMean",
}


@dataclass(frozen=True)
class Spec:
    """One program."""

    seed: int
    ranks: int
    rows: tuple[int, ...]
    steps: tuple[str, ...]
    residual: float
    objective: Literal["sum", "replicated"]
    end: str
    dtype: torch.dtype
    unused: int | None
    verbs: bool
    fault: str | None = None
    at: int = -1
    expected: tuple[str, ...] = field(default=())

    @property
    def place(self) -> str:
        """The Function with the fault."""
        kinds = (*self.steps, self.end)
        return _NAMES[kinds[self.at]]

    def random(self, *key: object) -> torch.Generator:
        return torch.Generator().manual_seed(random.Random(f"{self.seed} {key}").getrandbits(40))

    def inputs(self, rank: int) -> tuple[object, ...]:
        x = torch.randn(self.rows[rank], WIDTH, dtype=self.dtype, generator=self.random("x", rank))
        w = torch.randn(len(self.steps), WIDTH, WIDTH, dtype=self.dtype, generator=self.random("w"))
        v = torch.randn(WIDTH, dtype=self.dtype, generator=self.random("v"))
        return x, Input(w, gm.R), Input(v, gm.I)

    def fn(self, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        rank = dist.get_rank()
        for i, kind in enumerate(self.steps):
            x = x @ w[i]
            x = x * (1 + 0.1 * (x * x.conj()).real)
            x = getattr(self, f"_{kind}")(x, v, i, rank)
        coefficient = 0.5 + torch.rand(len(x), dtype=torch.float64, generator=self.random("c", rank))
        each = coefficient * (x * x.conj()).real.sum(1).sqrt()
        each = each + 0.3 * each**2
        fault = self.fault if self.at == len(self.steps) else None
        if self.end == "mean":
            return HandMean.apply(each, fault)
        if self.end == "total":
            return gm.all_reduce(each.sum(), dst=gm.I) if self.verbs else HandTotal.apply(each.sum(), fault)
        return each.sum()

    def _gather(self, x: Tensor, v: Tensor, i: int, rank: int) -> Tensor:
        rows = (
            gm.all_gather(x, sizes="auto") if self.verbs else HandGather.apply(x, self._fault(i), sizes_of(x))
        )
        mix = torch.randn(len(x), len(rows), dtype=self.dtype, generator=self.random("m", i, rank))
        if rank == self.unused:  # takes part in the backward, and has nothing to say there
            mix = 0 * mix
        return (self.residual if rank != self.unused else 1) * x + 0.3 * mix @ rows

    def _reduce(self, x: Tensor, v: Tensor, i: int, rank: int) -> Tensor:
        own = (x * torch.randn(len(x), 1, dtype=self.dtype, generator=self.random("o", i, rank))).sum(0)
        total = gm.all_reduce(own, dst=gm.R) if self.verbs else HandReduce.apply(own, self._fault(i))
        use = torch.randn(len(x), 1, dtype=self.dtype, generator=self.random("u", i, rank))
        return x + (0 if rank == self.unused else 0.3) * use * total

    def _copy(self, x: Tensor, v: Tensor, i: int, rank: int) -> Tensor:
        mine = gm.replicate(v) if self.verbs else HandCopy.apply(v, self._fault(i))
        use = torch.randn(len(x), 1, dtype=self.dtype, generator=self.random("u", i, rank))
        return x + 0.3 * use * mine

    def _fault(self, i: int) -> str | None:
        return self.fault if self.at == i else None


def random_spec(seed: int, fault: str | None) -> Spec:
    """A program; with a fault, one that has a place for it."""
    pick = random.Random(f"{seed} {fault}")
    ranks = pick.choice([2, 3, 4])
    uneven = fault in ("own share", "local means") or (
        fault not in ("wrong slice", "summed again") and pick.random() < 0.5
    )
    rows = tuple(pick.randint(1, 3) for _ in range(ranks)) if uneven else (pick.randint(1, 2),) * ranks
    if uneven and len(set(rows)) == 1:
        rows = (rows[0] + 1, *rows[1:])
    where = pick.choice(_WHERE[fault]) if fault else ""
    steps = [pick.choice(["gather", "reduce", "copy"]) for _ in range(pick.choice([1, 1, 2]))]
    end = (
        "mean" if where == "mean" else "total" if where == "total" else pick.choice(["", "", "total", "mean"])
    )
    if fault in ("own slice", "dropped", "own share"):
        end = end if fault == "own slice" else ""
    if where in ("gather", "reduce", "copy"):
        steps[pick.randrange(len(steps))] = where
    at = len(steps) if where in ("total", "mean") else steps.index(where) if where else -1
    unused = ranks - 1 if fault == "dropped" else pick.choice([None, ranks - 1])
    return Spec(
        seed=seed,
        ranks=ranks,
        rows=rows,
        steps=tuple(steps),
        residual=pick.choice([0.0, 1.0]),
        objective="sum" if end == "" else "replicated",
        end=end,
        dtype=torch.complex128 if fault == "conjugate" or pick.random() < 0.3 else torch.float64,
        unused=unused,
        verbs=fault is None and pick.random() < 0.5,
        fault=fault,
        at=at,
        expected=FAULTS[fault] if fault else (),
    )
