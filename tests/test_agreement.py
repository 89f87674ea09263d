"""Calls that do not fit together end in one clear error on every rank, on Gloo too, which would abort or hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradmesh as gm
from gradmesh.ops.base import Op
from gradmesh.ops.registry import REGISTRY
from gradmesh.runtime.mesh import Axis
from gradmesh.transport.call_checks import Signature

Ranks = Callable[[int], Callable[..., list[Any]]]

MISFITS: dict[str, Callable[[int], object]] = {
    "uneven all_gather": lambda r: gm.all_gather(torch.ones(2 + r)),
    "uneven other dim": lambda r: gm.all_gather(torch.ones(2, 2 + r), sizes="auto"),
    "uneven reduce_scatter": lambda r: gm.reduce_scatter(torch.ones(2 + 2 * r)),
    "uneven all_reduce": lambda r: gm.all_reduce(torch.ones(2 + r), dst=gm.R),
    "uneven max": lambda r: gm.all_reduce(torch.ones(2 + r), op="max", dst=gm.R),
    "uneven all_to_all": lambda r: gm.all_to_all(torch.ones(2 + 2 * r)),
    "uneven gather": lambda r: gm.gather(torch.ones(1 + r)),
    "uneven broadcast": lambda r: gm.broadcast(torch.ones(1 + r)),
    "uneven shift": lambda r: gm.shift(torch.ones(1 + r)),
    "uneven scan": lambda r: gm.scan(torch.ones(1 + r)),
    "uneven halo": lambda r: gm.halo_exchange(torch.ones(2 + r)),
    "other dtypes": lambda r: gm.all_gather(torch.ones(2, dtype=torch.float64 if r else torch.float32)),
    "other roots": lambda r: gm.broadcast(torch.ones(2), root=r),
    "other reductions": lambda r: gm.all_reduce(torch.ones(2), op="sum" if r else "mean", dst=gm.R),
    "other conventions": lambda r: gm.all_gather(torch.ones(2), dst=gm.R if r else gm.I),
    "other verbs": lambda r: gm.all_gather(torch.ones(2)) if r else gm.shift(torch.ones(2)),
    "more taken than sent": lambda _: gm.all_to_all(torch.ones(5), split_sizes=(2, 3), concat_sizes=(2, 3)),
    "less sent than taken, of other dims": lambda r: gm.all_to_all(
        torch.ones(3, 2), split_dim=0, concat_dim=1, split_sizes=((1, 2), (2, 1))[r]
    ),
    "fewer rows sent than taken": lambda r: gm.neighbor_all_to_all(
        torch.ones(3), send_rows={1 - r: torch.arange(2)}, receive_counts={1 - r: 2 + r}
    ),
    "other explicit sizes": lambda r: gm.all_gather(torch.ones(2), sizes=(2, 2 + r) if r == 0 else (3, 2)),
}


def text_of(name: str) -> str:
    with pytest.raises(gm.MismatchError) as caught:
        MISFITS[name](gm.axis().rank)
    # Nothing is left in the air: the next call meets its like.
    assert gm.all_gather(torch.tensor([gm.axis().rank])).tolist() == [0, 1]
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize("name", MISFITS)
def test_mismatch_on_gloo_raises_on_every_rank_with_every_ranks_call(name: str, processes: Ranks) -> None:
    for rank, text in enumerate(processes(2)(text_of, name)):
        assert "the ranks' calls do not match" in text
        assert f"rank {rank} of 2" in text
        assert "rank 0: " in text
        assert "rank 1: " in text
        assert "test_agreement.py" in text
        assert "remedy" in text


@pytest.mark.parametrize("name", MISFITS)
def test_mismatch_on_threads_raises_on_every_rank(name: str, threads: Ranks) -> None:
    for rank, text in enumerate(threads(2)(text_of, name)):
        assert f"rank {rank} of 2" in text
        assert "test_agreement.py" in text


@pytest.mark.processes
def test_matching_calls_with_rank_local_fields_pass(processes: Ranks) -> None:
    def on_each_rank() -> list[int]:
        rank = gm.axis().rank
        x = torch.arange(3 + rank)
        y = gm.all_to_all(x, split_sizes=((1, 2), (4, 0))[rank], concat_sizes=((1, 4), (2, 0))[rank])
        return y.tolist()

    assert processes(2)(on_each_rank) == [[0, 0, 1, 2, 3], [1, 2]]


def test_identities_of_ops_differ_as_the_ops_do_and_keep_no_group() -> None:
    axis = Axis("x", 1, 3, object())  # type: ignore[arg-type]  # nothing is sent
    ops = [op for row in REGISTRY for example, _ in row.examples(axis) for op in (example, example.back)]
    ops = [op for op in ops if op.identity]
    assert len({type(op) for op in ops}) > 20
    for one in ops:
        assert not any(value is axis or isinstance(value, (Op, torch.Tensor)) for value in one.identity)
        for other in ops:
            assert (one.identity == other.identity) == (one == other)


@pytest.mark.processes
@pytest.mark.parametrize("level", [1, "deferred"])
def test_a_call_that_is_made_again_is_not_described_again(level: Any) -> None:
    def described() -> list[str]:
        made: list[str] = []

        def of(verb: str, *others: Any) -> Signature:
            made.append(verb)
            return original(verb, *others)

        original = Signature.of
        with pytest.MonkeyPatch.context() as patch, gm.check(level):
            patch.setattr(Signature, "of", of)
            for size in (2, 2, 3, 3):
                x = torch.ones(size, requires_grad=True)
                gm.all_reduce(x, dst=gm.I, op="mean").sum().backward()
                gm.scan(x).sum().backward()
        return made

    for made in gm.launch(described, 2, backend="gloo", timeout=60):
        assert sorted(made) == ["all_reduce"] * 2 + ["scan"] * 4
