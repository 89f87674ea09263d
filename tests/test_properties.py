"""The laws on ops that are drawn: kind, number of ranks, sizes, dimension, roots, pairs, precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradmesh as gm
from gradmesh.ops.all_gather import AllGather, ReduceScatter
from gradmesh.ops.all_reduce import AllReduce, AllReduceInvariant, Replicate
from gradmesh.ops.all_to_all import AllToAll
from gradmesh.ops.base import LinearOp
from gradmesh.ops.broadcast import Broadcast, BroadcastInvariant, KeepAtRoot, Reduce
from gradmesh.ops.convert import ReplicatedToPartial
from gradmesh.ops.gather import Gather
from gradmesh.ops.halo import HaloExchange
from gradmesh.ops.mean import Mean
from gradmesh.ops.permute import Permute
from gradmesh.ops.scan import Exscan, Scan
from gradmesh.ops.shard import AllGatherInvariant, Pad, Shard, ShardReplicated
from gradmesh.ops.sizes import EQUAL, Sizes
from gradmesh.verify import laws
from tests import contract

Threads = Callable[[int], Callable[..., list[Any]]]
Build = Callable[[gm.Axis], tuple[LinearOp, Sequence[int]]]
"""From an axis to an op and the shape of this rank's operand."""

PARTS: tuple[Callable[..., LinearOp], ...] = (AllGather, AllGatherInvariant, Pad)
WHOLES: tuple[Callable[..., LinearOp], ...] = (ReduceScatter, Shard, ShardReplicated)
ALIKE: tuple[Callable[..., LinearOp], ...] = (
    AllReduce,
    AllReduceInvariant,
    Replicate,
    Scan,
    Exscan,
    ReplicatedToPartial,
)
ROOTED: tuple[Callable[[gm.Axis, int], LinearOp], ...] = (
    Broadcast,
    BroadcastInvariant,
    KeepAtRoot,
    Reduce,
)


def there_or_back(op: LinearOp, shape: Sequence[int], back: bool) -> tuple[LinearOp, Sequence[int]]:
    return (op.adjoint, op.out_shape(shape)) if back else (op, shape)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[int, str, Build]:
    """A number of ranks, a text that says what was drawn, and the op."""
    world = draw(st.integers(1, 4))
    rest = draw(st.lists(st.integers(0, 3), max_size=2))
    dim = draw(st.integers(0, len(rest)))
    sizes = Sizes(tuple(draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))))
    even = draw(st.booleans())
    n = draw(st.integers(0, 3))

    def shape(size: int) -> tuple[int, ...]:
        return (*rest[:dim], size, *rest[dim:])

    kind = draw(
        st.sampled_from(["parts", "wholes", "alike", "rooted", "gather", "exchange", "route", "halo"])
    )
    name = kind
    build: Build
    if kind == "parts":
        part = draw(st.sampled_from(PARTS))
        build = lambda a: (
            part(a, dim, EQUAL if even else sizes),
            shape(n if even else sizes[a.rank]),
        )
    elif kind == "wholes":
        whole = draw(st.sampled_from(WHOLES))
        build = lambda a: (
            whole(a, dim, EQUAL if even else sizes),
            shape(n * world if even else sizes.total),
        )
    elif kind == "alike":
        alike = draw(st.sampled_from(ALIKE))
        build = lambda a: (alike(a), shape(n))
    elif kind == "rooted":
        rooted, root = draw(st.sampled_from(ROOTED)), draw(st.integers(0, world - 1))
        build = lambda a: (rooted(a, root), shape(n))
    elif kind == "gather":
        root, back = draw(st.integers(0, world - 1)), draw(st.booleans())

        build = lambda a: there_or_back(Gather(a, dim, root, sizes), shape(sizes[a.rank]), back)
    elif kind == "exchange":
        amounts = draw(st.lists(st.tuples(*[st.integers(0, 2)] * world), min_size=world, max_size=world))
        build = lambda a: (
            AllToAll(
                a, dim, dim, Sizes(tuple(amounts[a.rank])), Sizes(tuple(row[a.rank] for row in amounts))
            ),
            shape(sum(amounts[a.rank])),
        )
    elif kind == "route":
        targets = draw(st.permutations(range(world)))
        pairs = tuple(enumerate(targets))[: draw(st.integers(0, world))]

        build = lambda a: (
            (Permute(a, pairs=pairs), shape(n))
            if even
            else (Permute(a, pairs=pairs).along(dim, sizes), shape(sizes[a.rank]))
        )
    else:
        left, right = draw(st.integers(0, 5)), draw(st.integers(0, 5))
        wrap, back = draw(st.booleans()), draw(st.booleans())

        build = lambda a: there_or_back(
            HaloExchange(a, dim, left, right, wrap, sizes), shape(sizes[a.rank]), back
        )

    if draw(st.integers(0, 3)) == 0:
        plain = build
        build = lambda a: (Mean(plain(a)[0]), plain(a)[1])
        name = f"mean of {name}"
    return world, f"{name}, dim {dim} of {shape(n)}, {'even' if even else sizes}", build


def put_to(law: contract.Check, build: Build) -> None:
    law(*build(gm.axis()))


def sweep(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@sweep(200)
@given(drawn(), st.sampled_from(contract.LAWS))
def test_any_op_keeps_any_law(threads: Threads, case: tuple[int, str, Build], law: contract.Check) -> None:
    world, _, build = case
    threads(world)(put_to, law, build)


@pytest.mark.slow
@sweep(3000)
@given(drawn(), st.sampled_from(contract.LAWS))
def test_any_op_keeps_any_law_at_length(
    threads: Threads, case: tuple[int, str, Build], law: contract.Check
) -> None:
    world, _, build = case
    threads(world)(put_to, law, build)


def in_two_precisions(build: Build, there: torch.dtype, back: torch.dtype) -> None:
    """The op in a precision is the op on rounded operands, its result in the operand's dtype; so is its adjoint."""
    op, shape = build(gm.axis())
    if isinstance(op, Mean):
        op = op.op
    op = replace(op, comm_dtype=there, backward_dtype=back)
    x = laws.sample(op.src, shape, torch.float64, op.axis)
    for tried, sent in ((op, there), (op.adjoint, back)):
        plain = replace(tried, comm_dtype=None, backward_dtype=None)
        x = laws.sample(tried.src, shape, torch.float64, op.axis)
        y = tried.apply(x)
        assert y.dtype is torch.float64
        assert torch.equal(y, plain.apply(x.to(sent)).double())
        shape = y.shape


@sweep(100)
@given(
    drawn(),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_every_op_rounds_only_communicated_values(
    threads: Threads, case: tuple[int, str, Build], there: torch.dtype, back: torch.dtype
) -> None:
    world, _, build = case
    threads(world)(in_two_precisions, build, there, back)


@sweep(100)
@given(drawn())
def test_any_op_gives_the_same_bits_again(threads: Threads, case: tuple[int, str, Build]) -> None:
    def twice() -> None:
        op, shape = build(gm.axis())
        x = laws.sample(op.src, shape, torch.float32, op.axis)
        assert torch.equal(op.apply(x), op.apply(x))

    world, _, build = case
    threads(world)(twice)
