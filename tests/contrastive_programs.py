"""Random programs of contrastive losses on ranks, compared with the dense ones on one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.errors import GradmeshError
from tools.layers import losses

__all__ = ["DENSE", "LOSSES", "TABLES", "Program", "data", "dense", "differs", "drawn", "on_rank"]


DENSE: dict[str, Callable[..., Tensor]] = {
    "barlow_twins": lambda x, y, s, b, labels: losses.barlow_twins(x, y),
    "clip": lambda x, y, s, b, labels: losses.clip(x, y, s),
    "nt_xent": lambda x, y, s, b, labels: losses.nt_xent(x, y, s),
    "siglip": lambda x, y, s, b, labels: losses.siglip(x, y, s, b),
    "sup_con": lambda x, y, s, b, labels: losses.sup_con(x, y, s, labels),
    "vic_reg": lambda x, y, s, b, labels: losses.vic_reg(x, y),
}

LOSSES: dict[str, Callable[..., Tensor]] = {
    "barlow_twins": lambda x, y, s, b, labels, gather, tile, **o: gm.nn.barlow_twins_loss(x, y, **o),
    "clip": lambda x, y, s, b, labels, **o: gm.nn.clip_loss(x, y, s, **o),
    "nt_xent": lambda x, y, s, b, labels, **o: gm.nn.nt_xent_loss(x, y, s, **o),
    "siglip": lambda x, y, s, b, labels, **o: gm.nn.siglip_loss(x, y, s, b, **o),
    "sup_con": lambda x, y, s, b, labels, **o: gm.nn.sup_con_loss(torch.stack([x, y], 1), labels, s, **o),
    "vic_reg": lambda x, y, s, b, labels, gather, tile, **o: gm.nn.vic_reg_loss(x, y, **o),
}

TABLES = ("clip", "nt_xent", "siglip", "sup_con")
"""Those with a table of pairs."""


@dataclass(frozen=True)
class Program:
    """A loss of some samples, and what each rank does with it.

    Attributes:
        loss: its name.
        sizes: how many samples each rank has.
        features: of an embedding.
        seed: of the numbers.
        gather: as the loss takes it.
        tile: as the loss takes it.
        explicit_sizes: whether the sizes are passed.
        dtype: of the embeddings.
        frozen: ranks whose embeddings require no grad.
        fixed: whether scale and bias are numbers.
        uses: what each rank does with the loss: the loss, its square, or nothing; else every rank the loss once.
        wrong: a rank that does something else than the others.
        second: whether the second derivative is looked at.
    """

    loss: str
    sizes: tuple[int, ...]
    features: int = 3
    seed: int = 0
    gather: str = "all"
    tile: int | None = None
    explicit_sizes: bool = False
    dtype: torch.dtype = torch.float64
    frozen: tuple[int, ...] = ()
    fixed: bool = False
    uses: tuple[str, ...] | None = None
    wrong: tuple[int, str] | None = None
    second: bool = True


def data(program: Program) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The samples of all ranks, a scale, a bias, and labels."""
    generator = torch.Generator().manual_seed(program.seed)
    shape = (sum(program.sizes), program.features)
    x, y = (torch.randn(shape, dtype=torch.float64, generator=generator).to(program.dtype) for _ in range(2))
    labels = torch.randint(0, 3, shape[:1], generator=generator)
    s, b = torch.rand(2, dtype=torch.float64, generator=generator).to(_wide(program.dtype)) + 0.5
    return x, y, s, b, labels


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


USES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "loss": lambda loss: loss,
    "square": lambda loss: loss.square(),
    "nothing": lambda _: None,
}


def dense(program: Program) -> list[Tensor]:
    """Value, gradients and gradients of the gradients, of x, y, scale and bias, in one process and in float64."""
    x, y, s, b, labels = data(program)
    leaves = [t.double().requires_grad_() for t in (x, y, s, b)]
    value = DENSE[program.loss](*leaves, labels)
    total = value
    if program.uses is not None:
        used = [USES[use](value) for use in program.uses]
        total = sum((u for u in used if u is not None), 0 * value)
    return [value.detach(), *_derivatives(total, leaves, program, whole=True)]


def _derivatives(total: Tensor, leaves: list[Tensor], program: Program, *, whole: bool) -> list[Tensor]:
    if not program.second:
        return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
    first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True, materialize_grads=True)
    bent = torch.stack([g.sin().sum() for g in first[:2]]).sum()
    if not whole:
        bent = gm.all_reduce(bent, dst=gm.I)
    second = torch.autograd.grad(bent, leaves, allow_unused=True, materialize_grads=True)
    return [*(g.detach() for g in first), *second]


def on_rank(program: Program) -> list[Tensor] | str:
    """The same on this rank; or the name of the library's own error."""
    rank = gm.rank()
    x, y, s, b, labels = data(program)
    mine = gm.axis().slice(program.sizes)
    leaves = [t.clone().requires_grad_() for t in (x[mine], y[mine], s, b)]
    if rank in program.frozen:
        leaves[0].requires_grad_(False)
    given: list[Any] = [*leaves[:2], *([s.item(), b.item()] if program.fixed else leaves[2:]), labels[mine]]
    options: dict[str, Any] = {"gather": program.gather, "tile": program.tile}
    options |= {"sizes": program.sizes} if program.explicit_sizes else {}
    options |= {"dst": gm.I if program.uses is None else gm.R}
    loss = LOSSES[program.loss]
    if program.wrong is not None and program.wrong[0] == rank:
        loss = _spoilt(loss, program.wrong[1], given, options)
    try:
        if program.uses is None:
            value = loss(*given, **options)
            if not program.frozen:
                return [value.detach(), *_derivatives(value, leaves, program, whole=False)]
            value.backward()
        else:
            with gm.ordered():
                value = loss(*given, **options)
                gm.backward(USES[program.uses[rank]](value))
    except GradmeshError as error:
        return type(error).__name__
    return [value.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]


def _spoilt(loss: Callable[..., Tensor], how: str, given: list[Any], options: dict[str, Any]) -> Any:
    """A call that does not fit those of the other ranks."""
    if how == "tile":
        options["tile"] = 0
    elif how == "shape":
        given[1] = given[1][:, :-1]
        if loss is LOSSES["sup_con"]:
            given[0] = given[0][:, :-1]
    elif how == "dtype":
        given[0], given[1] = given[0].float(), given[1].float()
    elif how == "axis":
        options["axis"] = "none"
    elif how == "other":
        return LOSSES["barlow_twins"] if loss is not LOSSES["barlow_twins"] else LOSSES["vic_reg"]
    elif how == "labels":
        return lambda x, y, s, b, labels, **o: gm.nn.sup_con_loss(torch.stack([x, y], 1), None, s, **o)
    elif how == "gather":
        options["gather"] = "ring" if options["gather"] == "all" else "all"
    return loss


def differs(program: Program, found: list[list[Tensor] | str], rtol: float = 1e-9) -> str | None:
    """What is not as in one process, in words."""
    if program.wrong is not None:
        return None if all(isinstance(each, str) for each in found) else f"{program}: {found}"
    if any(isinstance(each, str) for each in found):
        return f"{program}: {found}"
    ranks: list[list[Tensor]] = found  # type: ignore[assignment]
    for place, followed in enumerate(dense(program)):
        if place >= len(ranks[0]):
            break
        expected = followed.detach()
        leaf = (place - 1) % 4
        if place == 0:
            pairs = [(each[0], expected) for each in ranks]
        elif leaf < 2:
            parts = expected.split(program.sizes)
            pairs = [
                (each[place], part)
                for rank, (each, part) in enumerate(zip(ranks, parts, strict=True))
                if leaf or rank not in program.frozen
            ]
        elif program.fixed:
            continue
        else:
            pairs = [(torch.stack([each[place] for each in ranks]).sum(0), expected)]
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        for got, right in pairs:
            off = float((got.detach().double() - right).abs().max()) if right.numel() else 0.0
            if not off <= rtol * max(scale, 1):
                return f"{program}: place {place}, off by {off} of {scale}"
    return None


def drawn(seed: int, ranks: int) -> Program:
    """A random program."""
    choose = random.Random(seed)
    loss = choose.choice(list(DENSE))
    sizes = [choose.choice([0, 1, 1, 2, 3, 5]) for _ in range(ranks)]
    if sum(sizes) < 3:
        sizes[choose.randrange(ranks)] += 3
    program = Program(
        loss,
        tuple(sizes),
        features=choose.randint(1 + (loss in ("vic_reg", "barlow_twins")), 5),
        seed=seed,
        gather=choose.choice(["all", "ring"]),
        tile=choose.choice([None, 1, 2, 3, 4, 7]),
        explicit_sizes=choose.random() < 0.5,
        fixed=choose.random() < 0.3,
    )
    what = choose.choice(["plain", "plain", "frozen", "uses", "wrong", "single"])
    if what == "frozen":
        frozen = tuple(rank for rank in range(ranks) if choose.random() < 0.5)
        return replace(program, frozen=frozen, second=False)
    if what == "uses":
        uses = [choose.choice(list(USES)) for _ in range(ranks)]
        return replace(program, uses=tuple(uses), second=False)
    if what == "single":
        return replace(program, dtype=torch.float32)
    if what == "wrong":
        ways = (
            ["tile", "shape", "dtype", "other"]
            + ["gather"] * (loss in TABLES)
            + ["labels"] * (loss == "sup_con")
        )
        ways = [way for way in ways if way != "tile" or loss in TABLES]
        ways = [way for way in ways if ranks > 1 or (way == "shape" and loss != "sup_con")]
        if not ways:
            return program
        return replace(program, explicit_sizes=False, wrong=(choose.randrange(ranks), choose.choice(ways)))
    return program
