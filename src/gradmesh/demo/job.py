"""Train on ranks and on one process, with the same images in the same order, and compare."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh._util.environment import require
from gradmesh.backends import shm
from gradmesh.demo.contrast import (
    GATHERS,
    Learner,
    Towers,
    Views,
    dense_loss,
    rank_epoch,
    rank_gradient,
)

__all__ = [
    "BATCH",
    "HELD_OUT",
    "ONE_PROCESS",
    "Curve",
    "Images",
    "Result",
    "Settings",
    "Watcher",
    "one_thread",
    "recall",
    "run",
]

HELD_OUT = 297
BATCH = 150  # Not a multiple of 4, so that the ranks' shards are uneven.
ONE_PROCESS = "one process"


@dataclass(frozen=True)
class Settings:
    """Options of the command line."""

    ranks: int = 4
    backend: str = field(default_factory=shm.default)
    epochs: int = 20
    seed: int = 0


@dataclass
class Curve:
    """Per epoch, the mean loss of the training batches and the recall@1 on the held-out images."""

    loss: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)

    def extend(self, losses: Sequence[float], recall: float) -> None:
        """Add an epoch."""
        self.loss.append(sum(losses) / len(losses))
        self.recall.append(recall)


@dataclass(frozen=True)
class Images:
    """The left and right halves of the images, shuffled by the seed, one row for each image."""

    training: Views
    held_out: Views

    @classmethod
    def load(cls, seed: int) -> Images:
        """Load scikit-learn's handwritten digits (no download).

        Raises:
            MissingExtraError: scikit-learn is not installed.
        """
        require("demo", "demo")
        from sklearn.datasets import load_digits

        images = torch.from_numpy(load_digits().images).double() / 8  # 0 to 16 becomes 0 to 2
        images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))]
        images = images - images[:-HELD_OUT].mean(dim=0)
        left, right = (half.flatten(1) for half in images.chunk(2, dim=2))
        return cls((left[:-HELD_OUT], right[:-HELD_OUT]), (left[-HELD_OUT:], right[-HELD_OUT:]))


@dataclass(frozen=True)
class Result:
    """The results of the job.

    Attributes:
        settings: its options.
        curves: the training curves of each gather and of one process.
        grad_error: for each gather, the largest absolute difference of any parameter's gradient on any rank from that
            on one process; for the first batch, at the initial parameters.
        largest_grad: the largest absolute entry of the gradient on one process.
        param_error: the largest absolute difference of any parameter on any rank, after training with gradmesh's
            gather, from training on one process.
        rank_error: the largest absolute difference of a parameter between ranks, at the end of any epoch.
        seconds: run time.
    """

    settings: Settings
    curves: dict[str, Curve]
    grad_error: dict[str, float]
    largest_grad: float
    param_error: float
    rank_error: float
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The results as plain values; `grad_error` and `recall` are those of gradmesh's gather."""
        return {
            "grad_error": self.grad_error["gradmesh"],
            "grad_error_no_gradient": self.grad_error["no gradient"],
            "grad_error_slice_only": self.grad_error["slice only"],
            "largest_grad": self.largest_grad,
            "param_error": self.param_error,
            "rank_error": self.rank_error,
            "recall": self.curves["gradmesh"].recall[-1],
            **vars(self.settings),
            "seconds": round(self.seconds, 2),
            "curves": {name: vars(curve) for name, curve in self.curves.items()},
        }


class Watcher:
    """Progress callbacks; this base class ignores them."""

    def turn(self, epoch: int) -> None:
        """One gather finished an epoch."""

    def epoch(self, epoch: int, curves: dict[str, Curve]) -> None:
        """Every gather finished an epoch."""


def run(settings: Settings, watcher: Watcher | None = None) -> Result:
    """Run the job.

    Raises:
        ArgumentError: invalid number of ranks or backend.
        MissingExtraError: scikit-learn is not installed.
        RankError: a rank failed.
    """
    watcher = watcher or Watcher()
    begin = time.perf_counter()
    images = Images.load(settings.seed)
    views = images.training
    order = torch.Generator().manual_seed(settings.seed)
    dense = Learner.new(settings.seed)
    learners = {gather: Learner.new(settings.seed) for gather in GATHERS}
    curves = {name: Curve() for name in (*GATHERS, ONE_PROCESS)}
    param_error = rank_error = 0.0

    def dense_loss_of(model: Towers, batch: Tensor) -> Tensor:
        return dense_loss(model, views, batch)

    with one_thread(), gm.Ranks(settings.ranks, backend=settings.backend) as ranks:
        grad_error, largest_grad = _grad_errors(ranks, dense.model, views)
        for epoch in range(settings.epochs):
            batches = torch.randperm(len(views[0]), generator=order).split(BATCH)
            losses = dense.train(dense_loss_of, batches)
            curves[ONE_PROCESS].extend(losses, recall(dense.model, images.held_out))
            for gather in GATHERS:
                learnt, shares = zip(
                    *ranks.run(rank_epoch, gather, learners[gather], views, batches), strict=True
                )
                learners[gather] = learnt[0]
                losses = [sum(parts) for parts in zip(*shares, strict=True)]
                curves[gather].extend(losses, recall(learnt[0].model, images.held_out))
                rank_error = max(rank_error, *(_deviation(one.model, learnt[0].model) for one in learnt))
                if gather == "gradmesh":
                    param_error = max(_deviation(one.model, dense.model) for one in learnt)
                watcher.turn(epoch)
            watcher.epoch(epoch, curves)
    seconds = time.perf_counter() - begin
    return Result(settings, curves, grad_error, largest_grad, param_error, rank_error, seconds)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: the matrices are small, and more threads would compete with the ranks for cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def recall(model: Towers, views: Views) -> float:
    """Recall@1: the share of images whose most similar other half is their own; the mean of both directions."""
    with torch.no_grad():
        left, right, _ = model(*views)
    similarity = left @ right.T
    matches = torch.arange(len(similarity))
    hits = [(similarity.argmax(dim=dim) == matches).double().mean().item() for dim in (0, 1)]
    return float(sum(hits) / 2)


def _grad_errors(ranks: gm.Ranks, model: Towers, views: Views) -> tuple[dict[str, float], float]:
    """Each gather's largest deviation from the dense gradient, and that gradient's largest entry."""
    batch = torch.arange(BATCH)
    expected = torch.autograd.grad(dense_loss(model, views, batch), list(model.parameters()))
    errors = {
        gather: max(
            _difference(got, expected) for got in ranks.run(rank_gradient, gather, model, views, batch)
        )
        for gather in GATHERS
    }
    return errors, max(grad.abs().max().item() for grad in expected)


def _deviation(model: Towers, expected: Towers) -> float:
    return _difference(list(model.parameters()), list(expected.parameters()))


def _difference(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(got, expected, strict=True))
