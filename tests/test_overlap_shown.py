"""The programs of `tools.overlap` are right, what they overlap is hidden, and the trace shows it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.verify import Link, Timeline, timeline
from tools.overlap import chain as chain_room
from tools.overlap import ring as ring_room
from tools.overlap.chain import chain
from tools.overlap.measure import HALVES, Chain, Figures, Program, Ring, link_for, measured
from tools.overlap.ring import ring_attention

Ranks = Callable[[int], Callable[..., list[Any]]]


def drawn(rank: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def far(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest deviation, relative to the largest entry of each."""
    return max(float((f - e).abs().max() / e.abs().max()) for f, e in zip(found, expected, strict=True))


# ---- the chain


LAYERS, WIDTH = 8, 6


def layers(rank: int, size: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    shares = [drawn(rank, WIDTH // size, WIDTH, seed=3 + layer) for layer in range(LAYERS)]
    return drawn(rank, 5, WIDTH, seed=1), drawn(rank, WIDTH, WIDTH, seed=2), shares


def chain_on_rank() -> tuple[float, list[Tensor]]:
    x, first, shares = layers(gm.rank(), gm.world_size())
    loss = (1 + gm.rank()) * chain(x, first, shares).square().sum()
    return loss.item(), list(torch.autograd.grad(loss, [x, first, *shares]))


def dense_chain(size: int) -> list[tuple[float, list[Tensor]]]:
    ranks = [layers(rank, size) for rank in range(size)]
    losses = []
    for rank, (x, first, _) in enumerate(ranks):
        y = (x @ first).tanh()
        for layer in range(LAYERS):
            y = (y @ torch.cat([shares[layer] for _, _, shares in ranks])).tanh()
        losses.append((1 + rank) * y.square().sum())
    total = torch.stack(losses).sum()
    return [
        (loss.item(), list(torch.autograd.grad(total, [x, first, *shares], retain_graph=True)))
        for loss, (x, first, shares) in zip(losses, ranks, strict=True)
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_chain_is_that_of_one_process(size: int, threads: Ranks) -> None:
    for (loss, found), (expected, gradients) in zip(
        threads(size)(chain_on_rank), dense_chain(size), strict=True
    ):
        assert loss == pytest.approx(expected, rel=1e-13)
        assert far(found, gradients) < 1e-12


# ---- ring attention


def sequence(rank: int) -> list[Tensor]:
    """Queries, keys and values, with scores so large that a softmax without its shift overflows."""
    q, k, v = (drawn(rank, 2, 12, 4, seed=seed) for seed in (11, 12, 13))
    return [(400 * q).detach().requires_grad_(), k, v]


def ring_on_rank(blocks: int) -> tuple[Tensor, list[Tensor]]:
    q, k, v = sequence(gm.rank())
    out = ring_attention(q, k, v, blocks)
    loss = ((1 + gm.rank()) * out).sin().sum()
    return out.detach(), list(torch.autograd.grad(loss, [q, k, v]))


def dense_attention(size: int) -> list[tuple[Tensor, list[Tensor]]]:
    ranks = [sequence(rank) for rank in range(size)]
    q, k, v = (torch.cat([one[part] for one in ranks], 1) for part in range(3))
    out = ((q @ k.mT) / 2).softmax(-1) @ v
    parts = out.chunk(size, 1)
    total = torch.stack([((1 + rank) * part).sin().sum() for rank, part in enumerate(parts)]).sum()
    return [
        (part.detach(), list(torch.autograd.grad(total, one, retain_graph=True)))
        for part, one in zip(parts, ranks, strict=True)
    ]


@pytest.mark.parametrize(("size", "blocks"), [(1, 1), (2, 4), (3, 1), (3, 4)])
def test_ring_attention_is_that_of_one_process(size: int, blocks: int, threads: Ranks) -> None:
    for (out, found), (whole, gradients) in zip(
        threads(size)(ring_on_rank, blocks), dense_attention(size), strict=True
    ):
        assert far([out], [whole]) < 1e-12
        assert far(found, gradients) < 1e-12


# ---- what is hidden


WORK = 10e-3
"""Seconds that a piece of work takes in forward; in backward twice that."""


class Slept(torch.autograd.Function):
    """Work that is done elsewhere, as by a GPU, so that nothing which runs beside the test can slow it down."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(WORK)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(2 * WORK)
        return grad.clone()


PIECES = {"chain": 9, "ring": 12}
SMALL: dict[str, Callable[[], Program]] = {"chain": partial(Chain, 4, 6), "ring": partial(Ring, 1, 6, 2, 6)}


def balanced(name: str, run: Callable[..., list[Any]]) -> Figures:
    """Figures of a program, on a wire whose calls take as long as the work does in forward."""
    plain = chain_room.layer, ring_room.attend
    chain_room.layer = lambda x, weight: Slept.apply(plain[0](x, weight))
    ring_room.attend = lambda q, k, v, seen: plain[1](Slept.apply(q), k, v, seen)
    try:
        return measured(run, SMALL[name], link_for(run, SMALL[name], PIECES[name] * WORK), 3, min)
    finally:
        chain_room.layer, ring_room.attend = plain


@pytest.mark.timed
@pytest.mark.parametrize("name", PIECES)
def test_overlapped_communication_is_hidden_forward_and_backward(name: str, threads: Ranks) -> None:
    """At least half of what can be hidden, as other tests run beside it; docs/reports/overlap.md has real figures."""
    figures = balanced(name, threads(2))
    for half in HALVES:
        assert figures.times["work"][half] >= PIECES[name] * WORK
        in_turn, best = figures.times["in turn"][half], figures.best(half)
        assert in_turn > 1.2 * best
        assert in_turn - figures.times["overlapped"][half] > 0.5 * (in_turn - best)


# ---- what is seen


def seen_on_rank(overlapped: bool) -> Timeline:
    x, first, shares = layers(gm.rank(), gm.world_size())
    with gm.verify.delayed(Link(3000, 1)), timeline() as line:
        y = chain(x, first, shares) if overlapped else gm.all_gather(x)
        ((1 + gm.rank()) * y.square().sum()).backward()
    return line


def entries_of(line: Timeline, folder: Path) -> list[dict[str, Any]]:
    line.save_trace(folder / "trace.json")
    found: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return found


def check_trace(line: Timeline, calls: int, tmp_path: Path) -> None:
    """Each rank's calls, one gradient for each on the same rank, and slices that do not overlap."""
    entries = entries_of(line, tmp_path)
    arrows = {kind: {e["id"]: e for e in entries if e["ph"] == kind} for kind in "sf"}
    for rank in (0, 1):
        events = line.events.select(rank=rank)
        forward, backward = events.select(phase="forward"), events.select(phase="backward")
        assert [e.verb for e in forward] == ["all_gather"] * calls
        assert sorted(e.origin for e in backward if e.origin is not None) == sorted(e.number for e in forward)
        for event in backward:
            assert event.verb == "reduce_scatter"
            start, end = arrows["s"][event.number], arrows["f"][event.number]
            origin = line.events[event.origin or 0]
            assert start["pid"] == end["pid"] == origin.rank == rank
            assert start["ts"] == pytest.approx(1e6 * (origin.start or 0))
            assert end["ts"] == pytest.approx(1e6 * (event.start or 0))
            assert (event.end or 0) - (event.start or 0) >= 3e-3
            assert Path(__file__).name in event.of or "chain.py" in event.of
    rows: dict[tuple[int, int], float] = {}
    for entry in sorted((e for e in entries if e["ph"] == "X"), key=lambda e: e["ts"]):
        row = entry["pid"], entry["tid"]
        assert entry["dur"] >= 0
        assert entry["ts"] >= rows.get(row, 0) - 1e-3, "slices of one row overlap"
        rows[row] = entry["ts"] + entry["dur"]
    names = {e["name"] for e in entries if e["ph"] == "X"}
    assert {"forward work", "backward work", "all_gather", "reduce_scatter backward"} <= names
    assert {w.rank for w in line.work} == {0, 1}


def test_the_trace_has_an_arrow_from_each_call_to_its_gradient(tmp_path: Path, threads: Ranks) -> None:
    check_trace(Timeline.joined(threads(2)(seen_on_rank, False)), 1, tmp_path)
    check_trace(Timeline.joined(threads(2)(seen_on_rank, True)), LAYERS, tmp_path)


def test_the_trace_of_processes_has_one_clock(tmp_path: Path, processes: Ranks) -> None:
    line = Timeline.joined(processes(2)(seen_on_rank, True))
    check_trace(line, LAYERS, tmp_path)
    one, other = (line.events.select(rank=rank, phase="backward") for rank in (0, 1))
    for ours, theirs in zip(one, other, strict=True):  # a collective ends nowhere before it began everywhere
        assert (ours.end or 0) > (theirs.start or 0)
        assert (theirs.end or 0) > (ours.start or 0)


def test_work_and_waits_fill_the_time_of_a_rank(threads: Ranks) -> None:
    for line in threads(2)(seen_on_rank, False):
        worked = sum(one.end - one.start for one in line.work)
        waited = sum(event.waited for event in line.events)
        end = max(one.end for one in line.work)
        assert worked + waited == pytest.approx(end, rel=1e-6)
        assert waited >= 2 * 3e-3


def test_the_picture_is_written(tmp_path: Path, threads: Ranks) -> None:
    line = Timeline.joined(threads(2)(seen_on_rank, True))
    line.save_picture(tmp_path / "line.png", "a chain")
    line.save_picture(tmp_path / "line.svg", "a chain")
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")
    picture = (tmp_path / "line.svg").read_text()
    assert picture.count("<path") > 2 * LAYERS


def test_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "gradmesh.verify.timeline_picture", raising=False)
    with pytest.raises(gm.MissingExtraError, match=r"gradmesh\[demo\]"):
        Timeline(1.0).save_picture(tmp_path / "line.png")


def test_timelines_that_cannot_be_joined_raise() -> None:
    for parts in ([], [Timeline()], [Timeline(1.0), Timeline()]):
        with pytest.raises(gm.ArgumentError, match="no complete records"):
            Timeline.joined(parts)
