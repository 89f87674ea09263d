"""What an op is called in error texts: the call as a user writes it, which tells different ops apart."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields
from typing import Any

import pytest
import torch

import gradmesh as gm
from gradmesh.ops.all_reduce import AllReduce, Extremum, Replicate
from gradmesh.ops.base import Op
from gradmesh.ops.halo import HaloExchange
from gradmesh.ops.mean import Mean
from gradmesh.ops.permute import Permute, Shift
from gradmesh.ops.registry import REGISTRY
from gradmesh.ops.shard import Pad
from gradmesh.ops.sizes import EQUAL, Sizes

Threads = Callable[[int], Callable[..., list[Any]]]


def axis_of(rank: int) -> gm.Axis:
    return gm.Axis("any", rank, 3, None)  # type: ignore[arg-type]  # nothing is sent


def ops(rank: int = 0) -> list[Op]:
    """Every example of the registry, each with its adjoint, and what is not linear."""
    axis = axis_of(rank)
    listed = [op for row in REGISTRY for op, _ in row.examples(axis)]
    turned = [Extremum(axis, True), Extremum(axis, False)]
    return [*listed, *(op.adjoint for op in listed), *turned]


def identity(op: Op) -> Hashable:
    """What makes an op the one that it is, on every rank alike."""
    if isinstance(op, Mean):
        return Mean, identity(op.op)
    names = [f.name for f in fields(op) if f.name not in ("axis", *op.rank_local_fields)]
    return type(op), tuple(getattr(op, name) for name in names)


def test_ops_that_differ_have_different_words_and_equal_ones_equal_words() -> None:
    words: dict[Hashable, set[str]] = {}
    for op in ops():
        words.setdefault(identity(op), set()).add(op.called)
    assert all(len(said) == 1 for said in words.values())
    every = [said for (said,) in words.values()]
    assert sorted(set(every)) == sorted(every)
    assert len(every) > 50


def test_every_rank_says_the_same_of_the_same_call() -> None:
    def texts(rank: int) -> list[str]:
        return [op.called for op in ops(rank) if op.sends and not op.rank_local_fields]

    # The parameters of these ops are the same on all ranks.
    assert texts(0) == texts(1) == texts(2)


def test_sent_dtypes_are_in_the_description() -> None:
    one, other = AllReduce(axis_of(0)), AllReduce(axis_of(0), comm_dtype=torch.bfloat16)
    assert one.called != other.called
    assert "comm_dtype=torch.bfloat16" in other.called


@pytest.mark.parametrize("op", ops(), ids=lambda op: op.called)
def test_texts_use_user_terms_and_name_no_class(op: Op) -> None:
    first = op.called.removeprefix("backward of ").split("(")[0]
    assert first in gm.__all__
    classes = {kind.__name__ for kind in type(op).__mro__} - {"object"}
    assert not any(f"{name}(" in op.called or f"={name}" in op.called for name in classes)
    assert "Sizes(" not in op.called


def test_only_calls_without_a_caller_are_described_as_backward() -> None:
    for row in REGISTRY:
        for op, _ in row.examples(axis_of(0)):
            assert op.public is row.public
            assert op.called.startswith("backward of ") is not row.public


def test_the_words_of_a_few_calls() -> None:
    axis = axis_of(0)
    uneven = Sizes((1, 2, 0))
    assert Pad(axis, 0, EQUAL).called == "backward of shard(dim=0, sizes=equal, src=gm.R)"
    assert Extremum(axis, True).called == "all_reduce(op='max')"
    assert HaloExchange(axis, 0, 1, 2, False, uneven).called == (
        "halo_exchange(dim=0, halo=(1, 2), sizes=(1, 2, 0), wrap=False)"
    )
    assert Mean(AllReduce(axis)).called == "all_reduce(dst=gm.R, op='mean')"
    assert Mean(Replicate(axis)).called == "backward of all_reduce(dst=gm.I, op='mean')"
    assert Permute(axis, pairs=((0, 1),)).called == "permute(pairs=((0, 1),))"
    assert Shift(axis).along(0, uneven).called == "shift(dim=0, offset=1, sizes=(1, 2, 0), wrap=True)"


def test_mismatch_lists_each_ranks_call(threads: Threads) -> None:
    def on_each_rank() -> str:
        with pytest.raises(gm.MismatchError) as caught:
            gm.all_gather(torch.ones(2, 3), dst=gm.I if gm.rank() else gm.R)
        return str(caught.value)

    for text in threads(2)(on_each_rank):
        assert "rank 0: all_gather(dim=0, dst=gm.R, sizes=equal) of float32[2, 3]" in text
        assert "rank 1: all_gather(dim=0, dst=gm.I, sizes=equal) of float32[2, 3]" in text
