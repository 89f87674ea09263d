"""Every op keeps the law, on every axis: worlds of 1 to 4 ranks and a subgroup whose ranks are not 0 and 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import gradmesh as gm
from gradmesh.ops.all_gather import AllGather, ReduceScatter
from gradmesh.ops.all_reduce import AllReduce, AllReduceInvariant, Replicate
from gradmesh.ops.all_to_all import AllToAll
from gradmesh.ops.base import LinearOp, SameShape
from gradmesh.ops.broadcast import Broadcast, KeepAtRoot, Reduce
from gradmesh.ops.convert import PartialFromVarying
from gradmesh.ops.halo import HaloExchange
from gradmesh.ops.mean import Mean
from gradmesh.ops.permute import Permute, Shift
from gradmesh.ops.registry import REGISTRY
from gradmesh.ops.scan import Scan
from gradmesh.ops.shard import AllGatherInvariant, Shard
from gradmesh.ops.sizes import EQUAL, Sizes
from gradmesh.transport import Transport
from gradmesh.verify import laws
from tests import contract

PLACES = [(1, "world"), (2, "world"), (3, "world"), (4, "world"), (4, "subgroup")]
SELDOM = {(2, "world"), (4, "world")}
"""Where each law alone is tried in the sweep only; the law as a whole is tried everywhere."""
Threads = Callable[[int], Callable[..., list[Any]]]


@pytest.mark.parametrize("row", range(len(REGISTRY)), ids=contract.row_ids())
@pytest.mark.parametrize(
    ("law", "size", "place"),
    [
        pytest.param(
            law,
            *place,
            id=f"{law.__name__}-{place[1]}-{place[0]}",
            marks=[pytest.mark.slow] * (place in SELDOM and law is not contract.keeps_the_law),
        )
        for law in contract.LAWS
        for place in PLACES
    ],
)
def test_every_op(law: contract.Check, row: int, size: int, place: str, threads: Threads) -> None:
    counts = threads(size)(contract.on_examples, law, [row], place)
    assert max(counts) > 0


@dataclass(frozen=True, init=False)
class Chain(SameShape):
    """One op after another, to build wrong ones."""

    ops: tuple[LinearOp, ...]

    verb = "chain"

    def __init__(self, *ops: LinearOp) -> None:
        for name, value in {"axis": ops[0].axis, "comm_dtype": None, "ops": ops}.items():
            object.__setattr__(self, name, value)

    def transfer(self, x: torch.Tensor, wire: Transport) -> torch.Tensor:
        for op in self.ops:
            x = op.apply(x)
        return x

    @property
    def adjoint(self) -> LinearOp:
        return Chain(*(op.adjoint for op in reversed(self.ops)))


def rejects_a_wrong_adjoint(op: LinearOp, shape: Sequence[int], wrong: LinearOp) -> None:
    assert laws.inner_product_error(op, shape, adjoint=wrong) > 1e-3
    assert laws.adjoint_matrix_error(op, shape, adjoint=wrong) > 1e-3


@pytest.mark.parametrize("row", range(len(REGISTRY)), ids=contract.row_ids())
def test_a_factor_of_the_world_size_is_caught(row: int, threads: Threads) -> None:
    def on_each_rank() -> None:
        for op, shape in REGISTRY[row].examples(gm.axis())[:1]:
            rejects_a_wrong_adjoint(op, shape, Mean(op.adjoint))

    threads(3)(on_each_rank)


def _wrong_pairs(axis: gm.Axis) -> dict[str, tuple[LinearOp, Sequence[int], LinearOp]]:
    """Adjoints that hand-written code has had, and what they were taken for."""
    pairs = ((0, 1), (1, 2))
    return {
        "slice without the sum": (AllGather(axis, 0, EQUAL), (2,), Shard(axis, 0, EQUAL)),
        "sum where the gradient is whole": (
            AllGatherInvariant(axis, 0, EQUAL),
            (2,),
            ReduceScatter(axis, 0, EQUAL),
        ),
        "identity for a sum": (AllReduce(axis), (2,), Replicate(axis)),
        "sum for an identity": (AllReduceInvariant(axis), (2,), AllReduceInvariant(axis)),
        "no sum behind a replicated weight": (Replicate(axis), (2,), Replicate(axis)),
        "shift on instead of back": (
            Shift(axis, offset=1, wrap=True),
            (2,),
            Shift(axis, offset=1, wrap=True),
        ),
        "pairs not turned round": (Permute(axis, pairs=pairs), (2,), Permute(axis, pairs=pairs)),
        "scan from the same end": (Scan(axis), (2,), Scan(axis)),
        "broadcast's gradient from the root alone": (Broadcast(axis, 0), (2,), KeepAtRoot(axis, 0)),
        "another root": (Broadcast(axis, 0), (2,), Reduce(axis, 1)),
        "slabs of the wrong side": (
            HaloExchange(axis, 0, 1, 0, True, Sizes((2,) * axis.size)),
            (2,),
            HaloExchange(axis, 0, 0, 1, True, Sizes((2,) * axis.size)).adjoint,
        ),
        "an exchange taken for an identity": (
            AllToAll(axis, 0, 0, EQUAL, EQUAL),
            (3,),
            PartialFromVarying(axis),
        ),
        "the sum of another rank's slice": (
            AllGather(axis, 0, EQUAL),
            (2,),
            Chain(ReduceScatter(axis, 0, EQUAL), Shift(axis, offset=1, wrap=True)),
        ),
    }


@pytest.mark.parametrize("mistake", _wrong_pairs(gm.Axis("any", 0, 3, None)))  # type: ignore[arg-type]
def test_a_known_mistake_is_caught(mistake: str, threads: Threads) -> None:
    def on_each_rank() -> None:
        op, shape, wrong = _wrong_pairs(gm.axis())[mistake]
        rejects_a_wrong_adjoint(op, shape, wrong)

    threads(3)(on_each_rank)


def test_the_dense_reference_would_notice_a_wrong_rule(threads: Threads) -> None:
    """The third-order check fails when backward passes on the wrong op's result."""

    def on_each_rank() -> bool:
        op = AllGather(gm.axis(), 0, EQUAL)
        lying = type("Lying", (AllGather,), {"adjoint": property(lambda self: Shard(self.axis, 0, EQUAL))})
        contract.matches_dense_autograd_to_third_order(op, (2, 3))
        try:
            contract.matches_dense_autograd_to_third_order(lying(gm.axis(), 0, EQUAL), (2, 3))
        except AssertionError:
            return True
        return False

    assert threads(2)(on_each_rank) == [True, True]
