"""The whole job: the model in parts and on one process, step by step."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import gradmesh as gm
from gradmesh.demo.following import ALONE, IN_PARTS, Tell
from gradmesh.demo.job import one_thread
from gradmesh.demo.lm.model import Settings, dense_model, in_parts, train, words_of
from gradmesh.demo.lm.settings import Job

__all__ = ["Result", "follow", "run"]


@dataclass(frozen=True)
class Result:
    """What the job finds.

    Attributes:
        job: what was asked.
        losses: of each step, in parts.
        right: of each step, on one process.
        apart: how far parameters are apart in the end, the largest element.
        words: how many characters there are.
        numbers: how many parameters, and the most that a rank has of them.
        seconds: of each half.
    """

    job: Job
    losses: list[float]
    right: list[float]
    apart: float
    words: int
    numbers: tuple[int, int]
    seconds: dict[str, float]

    @property
    def far(self) -> list[float]:
        """How far the losses are apart, step by step."""
        return [abs(a - b) for a, b in zip(self.losses, self.right, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """The result as plain numbers."""
        return {**asdict(self), "far": max(self.far)}


def follow(
    settings: Settings, dp: int, sp: int, tp: int, tell: Tell | None = None
) -> tuple[list[float], dict[str, Any], int]:
    """On each rank: the losses in parts, the dense state in the end, and how many parameters the rank has."""
    first, losses = gm.rank() == 0, list[float]()
    words, text = words_of()
    gm.mesh(dp=dp, sp=sp, tp=tp)
    model = in_parts(dense_model(len(words), settings))
    for loss in train(model, text, settings, parts=True):
        losses.append(loss)
        if first and tell is not None:
            tell(IN_PARTS, 1)
    return losses, gm.nn.dense_state_dict(model), sum(each.numel() for each in model.parameters())


def run(job: Job, tell: Tell) -> Result:
    """Do the job.

    Args:
        job: what is asked.
        tell: is told of each step; of those of ranks that are processes when all are done.
    """
    settings = Settings(steps=job.steps, seed=job.seed)
    words, text = words_of()
    dense = dense_model(len(words), settings)
    with one_thread():
        started = time.perf_counter()
        near = tell if job.backend == "threads" else None
        found = gm.launch(
            follow, job.ranks, backend=job.backend, args=(settings, job.dp, job.sp, job.tp, near)
        )
        if near is None:
            tell(IN_PARTS, job.steps)
        between, right = time.perf_counter(), list[float]()
        for loss in train(dense, text, settings, parts=False):
            right.append(loss)
            tell(ALONE, 1)
        over = time.perf_counter()
    losses, whole, _ = found[0]
    state = dense.state_dict()
    return Result(
        job,
        losses,
        right,
        max(float((whole[name] - state[name]).abs().max()) for name in state),
        len(words),
        (sum(each.numel() for each in dense.parameters()), max(own for _, _, own in found)),
        {IN_PARTS: between - started, ALONE: over - between},
    )
