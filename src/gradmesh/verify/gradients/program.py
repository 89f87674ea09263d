"""The checked program on one rank: its loss, its gradients, and its part of the objective."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from gradmesh.autograd.ordered import Order, ordered
from gradmesh.types import Type
from gradmesh.verify.gradients.directions import direction
from gradmesh.verify.gradients.inputs import RankInputs, local_gradient

__all__ = ["Objective", "Part", "Program", "inner"]

Objective = Literal["sum", "mean", "replicated"]


@dataclass(frozen=True)
class Part:
    """One rank's part of a value: a term that is summed over the ranks, and one that is replicated and counts once."""

    varying: float
    invariant: float

    @staticmethod
    def total(parts: list[Part]) -> float:
        """The value."""
        return sum(part.varying for part in parts) + parts[0].invariant


def inner(x: Tensor, y: Tensor) -> Tensor:
    """The real inner product: complex numbers are pairs of real ones, as in torch's gradients."""
    if x.is_complex() or y.is_complex():
        return (x.conj() * y).real.sum()
    return (x * y).sum()


class Program:
    """A user function with this rank's inputs.

    Args:
        fn: returns this rank's loss.
        inputs: its arguments.
        objective: how the ranks' losses are combined.
        seed: the seed of the cotangents of the second-order check.
        in_order: whether forward and backward run inside `gradmesh.ordered()`.
    """

    def __init__(
        self, fn: Callable[..., Tensor], inputs: RankInputs, objective: Objective, seed: int, in_order: bool
    ) -> None:
        self.fn, self.inputs, self.objective, self.seed, self.in_order = fn, inputs, objective, seed, in_order

    def loss(self, offsets: Mapping[str, Tensor] | None = None) -> object:
        """The return value of the function, not validated, with some inputs shifted."""
        with self._called(offsets) as (loss, order):
            if order is not None and (loss is None or isinstance(loss, Tensor)):
                order.join(loss)
        self.inputs.settle()
        return loss

    def part(self, offsets: Mapping[str, Tensor] | None = None) -> Part:
        """This rank's part of the objective."""
        return self._counted(self.loss(offsets))

    def gradients(
        self, offsets: Mapping[str, Tensor] | None = None, keep: Callable[[], None] | None = None
    ) -> dict[str, Tensor | None]:
        """Run backward and return the gradients of this rank's leaves.

        Args:
            offsets: shifts of leaves.
            keep: called after backward, before the graph is freed.
        """
        with self._called(offsets) as (loss, order):
            retain = keep is not None
            if order is not None:
                order.backward(loss, retain_graph=retain)
            elif loss is not None:
                loss.backward(retain_graph=retain)
            if keep is not None:
                keep()
        return {name: leaf.grad for name, leaf in self.inputs.leaves.items()}

    def contracted(self, offsets: Mapping[str, Tensor] | None = None) -> Part:
        """The inner product of the first-order gradients with fixed random cotangents."""
        sums = {True: 0.0, False: 0.0}
        for name, grad in self.gradients(offsets).items():
            if grad is not None:
                product = float(inner(grad, self._cotangent(name, grad)))
                sums[self.inputs.leaves[name].type is Type.I] += product
        return Part(sums[False], sums[True])

    def second_gradients(self) -> dict[str, Tensor | None]:
        """The gradients of `contracted`, by double backward."""
        with self._called(None) as (loss, order):
            leaves = self.inputs.leaves
            wanted = [leaf.current for leaf in leaves.values() if leaf.current is not None]
            grad = torch.autograd.grad if order is None else order.grad
            first = grad(loss, wanted, create_graph=True, allow_unused=True)  # type: ignore[arg-type]
            terms = [
                inner(g, self._cotangent(name, g))
                for name, g in zip(leaves, first, strict=True)
                if g is not None
            ]
            whole = torch.stack(terms).sum() if terms else None
            if order is None and (whole is None or not whole.requires_grad):
                return dict.fromkeys(leaves)
            if whole is not None and not whole.requires_grad:
                whole = None
            found = grad(whole, wanted, allow_unused=True)  # type: ignore[arg-type]
        return {name: local_gradient(x, g) for name, x, g in zip(leaves, wanted, found, strict=True)}

    def tangent(self, along: Mapping[str, Tensor]) -> Part:
        """The forward-mode derivative of this rank's part of the objective."""
        in_order = ordered() if self.in_order else contextlib.nullcontext()
        with forward_ad.dual_level(), self.inputs.duals(along) as args, in_order as order:
            loss = self.fn(*args)
            moved = None if loss is None else forward_ad.unpack_dual(loss).tangent
            if order is not None:
                order.join(loss)
            return self._counted(torch.zeros(()) if moved is None else moved)

    def _cotangent(self, name: str, grad: Tensor) -> Tensor:
        """The cotangent of a gradient: the same on every rank unless the leaf varies."""
        varies = self.inputs.leaves[name].type is Type.V
        key = f"cotangent {name}" + (f" {dist.get_rank()}" if varies else "")
        return direction(self.seed, key, 0, grad.shape, grad.dtype)

    def _counted(self, loss: object) -> Part:
        value = float(loss.detach()) if isinstance(loss, Tensor) else 0.0 if loss is None else float("nan")
        if self.objective == "replicated":
            return Part(0.0, value)
        return Part(value / (dist.get_world_size() if self.objective == "mean" else 1), 0.0)

    @contextlib.contextmanager
    def _called(self, offsets: Mapping[str, Tensor] | None) -> Iterator[tuple[Tensor | None, Order | None]]:
        with torch.enable_grad():
            args = self.inputs.args(offsets)
            with ordered() if self.in_order else contextlib.nullcontext() as order:
                yield self.fn(*args), order
