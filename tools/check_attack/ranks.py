"""Scripts on ranks without any checker: what parameters got and became, and how their losses change."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from gradmesh.checker.run import processor_time
from gradmesh.launch.process_ranks import held_port
from tests.scripts import Script
from tests.scripts.running import STEP, Watch, once, own

_IDLE = 4.0
"""Seconds without work after which ranks are stuck."""


@dataclass
class Ran:
    """What one rank did."""

    # of each step what each parameter got, after clipping; None for one that got nothing
    gradients: list[list[Tensor | None]] = field(default_factory=list)
    # of each parameter at the beginning, and at the end
    values: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    losses: list[float] = field(default_factory=list)  # that backwards began at
    error: str = ""  # the traceback, where it raised


def script_at(path: Path, ranks: int) -> Script:
    """A script as the player of scripts takes it."""
    return Script(path, "", ranks, None, frozenset(), (), None, (), None, None, None)


def trained(path: Path, ranks: int, by_values: bool = False) -> list[Ran] | None:
    """Run a script; None where its ranks got stuck, or one ended without a result."""
    return _on_ranks(_trained, path, ranks, (by_values,))


def differences(
    path: Path, ranks: int, kinds: Sequence[Sequence[int]]
) -> list[tuple[float, list[float]]] | None:
    """How the ranks' losses change along a direction of each parameter, and what its gradients say of it.

    A loss that ranks repeat counts once. Ranks with the same number in `kinds` have copies of a parameter.
    """
    results = _on_ranks(_differences, path, ranks, tuple(map(tuple, kinds)))
    if results is None or any(each is None for each in results):
        return None
    found = []
    for at, kind in enumerate(kinds):
        plus, minus = (_total([each[1][2 * at + sign] for each in results]) for sign in (0, 1))
        firsts = [kind.index(part) for part in sorted(set(kind))]
        dots = [results[rank][0][at] for rank in firsts]
        found.append(((plus - minus) / (2 * STEP), [sum(dots)]))
    return found


def warm() -> None:
    """Start the server that ranks are forked from, with everything loaded that they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "tools.check_attack.ranks",
            "tests.scripts.warm",
            "torch.distributed.fsdp",
            "torch.nn.parallel",
            "torch.distributed._functional_collectives",
            "gradmesh.checker.hooks",
            "torch._dynamo",
        ]
    )
    process = context.Process(target=_nothing)
    process.start()
    process.join()


def _nothing() -> None:
    pass


def _total(runs: Sequence[Sequence[float]]) -> float:
    longest = max(map(len, runs))
    at_once = [{round(run[at], 10): run[at] for run in runs if at < len(run)} for at in range(longest)]
    return sum(sum(each.values()) for each in at_once)


class _Moved(Watch):
    """Moves one parameter, copies of it alike and parts of it apart."""

    def __init__(
        self, script: Script, kinds: Sequence[Sequence[int]], move: tuple[int, float] | None
    ) -> None:
        super().__init__(script, first=True, move=move)
        self.kinds = kinds
        self.found: list[float] = []

    def along(self, index: int, p: Tensor) -> Tensor:
        part = self.kinds[index][dist.get_rank()]
        generator = torch.Generator().manual_seed(1000 * part + index)
        return torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)

    def shift(self, index: int, p: Tensor, by: float) -> None:
        v = self.along(index, p)
        with torch.no_grad():
            p.add_(
                distribute_tensor(v, p.device_mesh, p.placements) if isinstance(p, DTensor) else v, alpha=by
            )

    def stepping(self, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        for index, p in enumerate(self.params):
            grad: Any = p.grad
            if isinstance(grad, DTensor):
                grad = grad.full_tensor()
            self.found.append(0.0 if grad is None else float((grad * self.along(index, p)).sum()))
        super().stepping(optimizer, *rest)


def _differences(path: Path, ranks: int, rank: int, port: int, *kinds: Sequence[int]) -> Any:
    torch.set_default_dtype(torch.float64)
    script = script_at(path, ranks)
    base = _Moved(script, kinds, None)
    if once(base, rank, port).error or len(base.found) != len(kinds):
        return None
    losses = []
    for index in range(len(kinds)):
        for by in (STEP, -STEP):
            seen = once(_Moved(script, kinds, (index, by)), rank, port)
            if seen.error:
                return None
            losses.append(seen.losses)
    return base.found, losses


def _trained(path: Path, ranks: int, rank: int, port: int, by_values: bool) -> Ran:
    watch = Watch(script_at(path, ranks))
    seen = once(watch, rank, port)
    weights = [list(each) for each in seen.weights]
    if watch.root is not None:
        weights.append([own(p) for p in watch.root.parameters()])
    if not by_values:
        gradients = seen.gradients
    else:  # what was subtracted
        moved = [
            [a - b for a, b in zip(before, after, strict=True)]
            for before, after in itertools.pairwise(weights)
        ]
        gradients = [list(each) for each in moved if any(bool(x.abs().max() > 0) for x in each)]
    first, last = (weights[0], weights[-1]) if weights else ([], [])
    return Ran(gradients, (first, last), seen.losses, seen.error)


def _rank(work: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    sent = io.BytesIO()
    torch.save(work(*args), sent)
    pipe.send_bytes(sent.getvalue())
    os._exit(0)


def _on_ranks(work: Callable[..., Any], path: Path, ranks: int, more: tuple[Any, ...]) -> list[Any] | None:
    context = multiprocessing.get_context("forkserver")
    pipes, started = [], []
    with held_port() as port:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(work, (path, ranks, rank, port, *more), theirs), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            started.append(process)
        results: list[Any] = [None] * ranks
        waiting = set(range(ranks))
        last, used = time.monotonic(), 0.0
        while waiting and time.monotonic() - last < _IDLE:
            ready = multiprocessing.connection.wait([pipes[rank] for rank in waiting], 0.2)
            for rank in [rank for rank in waiting if pipes[rank] in ready]:
                waiting.discard(rank)
                try:
                    results[rank] = torch.load(io.BytesIO(pipes[rank].recv_bytes()), weights_only=False)
                except (EOFError, ConnectionResetError):
                    results[rank] = None
                last = time.monotonic()
            now = sum(processor_time(started[rank].pid) for rank in waiting)
            if abs(now - used) > 0.05:
                last, used = time.monotonic(), now
        for process in started:
            process.kill()
            process.join()
    return None if waiting or (any(each is None for each in results) and work is _trained) else results
