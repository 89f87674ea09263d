"""The true gradient of a step: of the sum of the ranks' losses, each loss that ranks repeat counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh.checker.replay.engine import Again, Rank

__all__ = ["Truth", "in_double", "near", "truth_of"]


@dataclass
class Truth:
    """The objective of a step, and its derivatives.

    Attributes:
        objective: one number.
        different: how many different losses it is the sum of.
        unclear: backwards of the program's own on the way, of which it is not known what they make of a gradient.
        classes: for each rank the ranks whose loss is the same, itself among them; () where a rank has none.
        gradients: for each rank, of each parameter by its number, what this rank's own use of it adds; None where it
            is not used.
    """

    objective: Tensor
    different: int
    classes: list[tuple[int, ...]]
    gradients: list[dict[int, Tensor | None]]
    unclear: tuple[str, ...] = ()

    def at(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The objective's derivative with respect to tensors of the graph."""
        wanted = [x for x in tensors if x.requires_grad]
        found = iter(_derivatives(self.objective, wanted))
        return [next(found) if x.requires_grad else None for x in tensors]


def truth_of(again: Again) -> Truth | None:
    """The objective of ranks that were run again, and its derivatives; None without a loss."""
    losses = [_loss(rank) for rank in again.ranks]
    if all(loss is None for loss in losses):
        return None
    classes = _classes(again, losses)
    terms = [loss / len(group) for loss, group in zip(losses, classes, strict=True) if loss is not None]
    # A rank's own copy of the sum is not on its tape: that is done here.
    objective = torch.stack(terms).sum()
    flat = [(at, number, leaf) for at, rank in enumerate(again.ranks) for number, leaf in rank.leaves.items()]
    for rank in again.ranks:
        rank.unclear.names.clear()
    found = _derivatives(objective, [leaf for *_, leaf in flat])
    unclear = tuple(dict.fromkeys(again.unclear))
    for rank in again.ranks:
        if rank.missing:
            reached = _derivatives(objective, [x for _, x in rank.missing])
            rank.lost += [why for (why, _), x in zip(rank.missing, reached, strict=True) if x is not None]
    gradients: list[dict[int, Tensor | None]] = [{} for _ in again.ranks]
    for (at, number, _), gradient in zip(flat, found, strict=True):
        gradients[at][number] = gradient
    return Truth(objective, len({group for group in classes if group}), classes, gradients, unclear)


def in_double(x: Tensor) -> Tensor:
    """A tensor in double precision; a complex one with another dim for its two parts."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double()


def near(a: Tensor, b: Tensor, rtol: float) -> bool:
    """Whether two tensors are equal but for rounding, as a whole."""
    scale = max(float(a.abs().max()) if a.numel() else 0.0, float(b.abs().max()) if b.numel() else 0.0)
    return a.shape == b.shape and (a.numel() == 0 or float((a - b).abs().max()) <= rtol * scale)


def _loss(rank: Rank) -> Tensor | None:
    terms = []
    for root, x in rank.roots:
        if root.passed_on or not x.requires_grad:
            continue
        weight = torch.ones_like(x) if root.weight is None else root.weight
        term = (x * weight.reshape(x.shape).to(x.dtype)).sum()
        terms.append((term.real if term.is_complex() else term).double())
    return torch.stack(terms).sum() if terms else None


def _classes(again: Again, losses: Sequence[Tensor | None]) -> list[tuple[int, ...]]:
    """Ranks that repeat a loss: it is the same, and not by chance."""
    found: list[tuple[int, ...]] = []
    for rank, loss in enumerate(losses):
        alike = tuple(
            at
            for at, other in enumerate(losses)
            if loss is not None
            and other is not None
            and (at == rank or at not in again.ranks[rank].terms)
            # A NaN is not even near itself.
            and (at == rank or near(loss.detach(), other.detach(), 1e-6))
        )
        found.append(alike)
    if not again.calls:
        own = [_own_gradients(rank, loss) for rank, loss in zip(again.ranks, losses, strict=True)]
        found = [
            tuple(at for at in group if at == rank or _same(own[at], own[rank]))
            for rank, group in enumerate(found)
        ]
    return found


def _own_gradients(rank: Rank, loss: Tensor | None) -> list[Tensor]:
    if loss is None:
        return []
    return [x for x in _derivatives(loss, list(rank.leaves.values())) if x is not None]


def _derivatives(y: Tensor, xs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """None of none, which torch 2.11 refuses to be asked for."""
    found = torch.autograd.grad(y, xs, retain_graph=True, allow_unused=True) if xs else ()
    return [x.to_dense() if x is not None and x.layout is not torch.strided else x for x in found]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(near(x, y, 1e-6) for x, y in zip(a, b, strict=True))
