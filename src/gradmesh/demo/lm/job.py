"""Train the parallel model on ranks and the dense one on one process, and compare step by step."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import gradmesh as gm
from gradmesh.demo.following import ALONE, IN_PARTS, Progressed
from gradmesh.demo.job import one_thread
from gradmesh.demo.lm.model import Settings, dense_model, in_parts, train, words_of
from gradmesh.demo.lm.settings import Job

__all__ = ["Result", "follow", "run"]


@dataclass(frozen=True)
class Result:
    """The results of the job.

    Attributes:
        job: its options.
        losses: of each step, on ranks.
        right: of each step, on one process.
        apart: the largest absolute difference of a parameter after training.
        words: the size of the vocabulary.
        numbers: the number of parameters, and the largest number on a rank.
        seconds: run time of each run.
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
        """The absolute difference of the losses, step by step."""
        return [abs(a - b) for a, b in zip(self.losses, self.right, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """The results as plain values."""
        return {**asdict(self), "far": max(self.far)}


def follow(
    settings: Settings, dp: int, sp: int, tp: int, progress: Progressed | None = None
) -> tuple[list[float], dict[str, Any], int]:
    """On each rank: the losses, the dense state after training, and the number of local parameters."""
    first, losses = gm.rank() == 0, list[float]()
    words, text = words_of()
    gm.mesh(dp=dp, sp=sp, tp=tp)
    model = in_parts(dense_model(len(words), settings))
    for loss in train(model, text, settings, parts=True):
        losses.append(loss)
        if first and progress is not None:
            progress(IN_PARTS, 1)
    return losses, gm.nn.dense_state_dict(model), sum(each.numel() for each in model.parameters())


def run(job: Job, progress: Progressed) -> Result:
    """Run the job; `progress` is called for each step (for process ranks, once at the end)."""
    settings = Settings(steps=job.steps, seed=job.seed)
    words, text = words_of()
    dense = dense_model(len(words), settings)
    with one_thread():
        started = time.perf_counter()
        local = progress if job.backend == "threads" else None
        found = gm.launch(
            follow, job.ranks, backend=job.backend, args=(settings, job.dp, job.sp, job.tp, local)
        )
        if local is None:
            progress(IN_PARTS, job.steps)
        between, right = time.perf_counter(), list[float]()
        for loss in train(dense, text, settings, parts=False):
            right.append(loss)
            progress(ALONE, 1)
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
