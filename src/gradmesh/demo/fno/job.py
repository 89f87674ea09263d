"""Train the operator on ranks and on one process, with the same data in the same order, and compare."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.demo.drawing import seeded
from gradmesh.demo.fno.burgers import diffused, initial_fields, solved
from gradmesh.demo.fno.network import Operator, relative_error
from gradmesh.demo.fno.settings import Job
from gradmesh.demo.following import ALONE, IN_PARTS, Progressed
from gradmesh.demo.job import one_thread
from gradmesh.runtime.mesh import balanced

__all__ = ["Result", "Step", "data_of", "dense_operator", "run", "train"]

RATE = 0.006


@dataclass(frozen=True)
class Step:
    """The state after an epoch.

    Attributes:
        losses: of its steps.
        held_out: the error on the held-out solutions.
        operator: the operator.
    """

    losses: list[float]
    held_out: float
    operator: Operator


@dataclass(frozen=True)
class Result:
    """The results of the job.

    Attributes:
        job: its options.
        losses, right: of each step, on ranks and on one process.
        held_out: after each epoch, the error on held-out solutions, on ranks.
        slope: the difference of the first gradient from that on one process, relative to its largest entry.
        apart: the largest absolute difference of a parameter after training.
        baseline: the held-out error of the linear equation.
        picture: a held-out field, its solution, and the operator's prediction.
        seconds: run time.
    """

    job: Job
    losses: list[float]
    right: list[float]
    held_out: list[float]
    slope: float
    apart: float
    baseline: float
    picture: tuple[Tensor, Tensor, Tensor]
    seconds: float

    @property
    def far(self) -> list[float]:
        """The absolute difference of the losses, step by step."""
        return [abs(a - b) for a, b in zip(self.losses, self.right, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """The results as plain values."""
        return {
            "losses": self.losses,
            "held_out": self.held_out,
            "baseline": self.baseline,
            "gradient_error": self.slope,
            "loss_error": max(self.far),
            "param_error": self.apart,
            **vars(self.job),
            "seconds": round(self.seconds, 2),
        }


def data_of(job: Job) -> tuple[Tensor, Tensor]:
    """Fields and their solutions, held-out ones last."""
    fields = initial_fields(job.samples + job.held_out, job.points, job.seed)
    return fields, solved(fields)


def dense_operator(job: Job) -> Operator:
    """The initial operator."""
    with seeded(job.seed):
        return Operator(job)


def train(job: Job, fields: Tensor, solutions: Tensor, start: dict[str, Any], parts: bool) -> Iterator[Step]:
    """Train, and yield the state after each epoch; with `parts`, on ranks. The fields are not sharded yet."""
    sizes = balanced(job.points, gm.world_size()) if parts else None
    local = gm.axis().slice(sizes) if sizes else slice(None)
    with seeded(job.seed):
        operator = Operator(job, sizes)
    operator.load_state_dict(start)
    fields, solutions = fields[:, local], solutions[:, local]
    order = torch.Generator().manual_seed(job.seed)
    adam = torch.optim.Adam(operator.parameters(), lr=RATE)
    for _ in range(job.epochs):
        losses = []
        for batch in torch.randperm(job.samples, generator=order).split(job.batch):
            loss = relative_error(operator(fields[batch]), solutions[batch], parts)
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            error = relative_error(operator(fields[job.samples :]), solutions[job.samples :], parts)
        yield Step(losses, float(error), operator)


def _on_rank(
    job: Job, fields: Tensor, solutions: Tensor, start: dict[str, Any]
) -> tuple[list[Step], list[Tensor], Tensor]:
    """On a rank: its epochs, its first gradient, and the final prediction of one field, gathered."""
    sizes = balanced(job.points, gm.world_size())
    local = gm.axis().slice(sizes)
    with seeded(job.seed):
        operator = Operator(job, sizes)
    operator.load_state_dict(start)
    loss = relative_error(operator(fields[: job.batch, local]), solutions[: job.batch, local], True)
    first = list(torch.autograd.grad(loss, list(operator.parameters())))
    steps = list(train(job, fields, solutions, start, parts=True))
    with torch.no_grad():
        made = gm.all_gather(steps[-1].operator(fields[-1:, local]), dim=1, sizes=sizes)[0]
    return steps, first, made


def run(job: Job, progress: Progressed | None = None) -> Result:
    """Run the job.

    Raises:
        ArgumentError: invalid number of ranks or backend.
        RankError: a rank failed.
    """
    progress, started = progress or (lambda *_: None), time.perf_counter()
    with one_thread():
        fields, solutions = data_of(job)
        dense = dense_operator(job)
        start = {name: value.clone() for name, value in dense.state_dict().items()}
        loss = relative_error(dense(fields[: job.batch]), solutions[: job.batch], False)
        slopes = torch.autograd.grad(loss, list(dense.parameters()))
        alone = []
        for step in train(job, fields, solutions, start, parts=False):
            alone.append(step)
            progress(ALONE, 1)
        given = (job, fields, solutions, start)
        found = gm.launch(_on_rank, job.ranks, backend=job.backend, args=given)
        progress(IN_PARTS, job.epochs)
    largest = max(float(slope.abs().max()) for slope in slopes)
    state = alone[-1].operator.state_dict()
    steps, held = found[0][0], slice(job.samples, None)
    return Result(
        job,
        [loss for step in steps for loss in step.losses],
        [loss for step in alone for loss in step.losses],
        [step.held_out for step in steps],
        max(_max_difference(first, slopes) for _, first, _ in found) / largest,
        max(_max_difference(each[-1].operator.state_dict().values(), state.values()) for each, _, _ in found),
        float(relative_error(diffused(fields[held]), solutions[held], False)),
        (fields[-1], solutions[-1], found[0][2]),
        time.perf_counter() - started,
    )


def _max_difference(found: Any, right: Any) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, right, strict=True))
