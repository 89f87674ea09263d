"""`gradmesh.testing` passes right ops and transports, and names the law that a wrong one breaks."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.backends.threads.group import ThreadsGroup
from gradmesh.ops.base import LinearOp, SameShape
from gradmesh.ops.meaning import meaning
from gradmesh.ops.pair import Receive, Send
from gradmesh.ops.registry import REGISTRY
from gradmesh.ops.transport import PlainAxis
from gradmesh.testing import LawError, check_op, check_transport
from gradmesh.transport import TRANSPORTS, Transport
from gradmesh.transport.process_group import OwnGroupTransport
from tests.forking import Forking
from tests.test_own_ops import Mirror
from tests.test_transport import Letters

Ranks = Callable[[int], Callable[..., list[Any]]]


# ---- right ones ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weighted(SameShape):
    """P -> R: the sum with a weight, along a dim that it has to count."""

    dim: int = 0

    verb = "weighted"
    src, dst = gm.P, gm.R
    sums = True

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        weight = torch.arange(1.0, 1 + x.shape[self.dim]).to(x.dtype)
        return wire.sum(x.transpose(self.dim, -1).mul(weight).transpose(self.dim, -1))

    def batched(self) -> LinearOp:
        return replace(self, dim=self.dim + 1)

    @property
    def adjoint(self) -> LinearOp:
        return type(self)(self.axis, self.dim, **self.swapped)


def on(op: type[LinearOp], *args: Any, shape: Sequence[int] = (2, 3)) -> Any:
    return lambda axis: [(op(axis, *args), shape)]


def test_right_ops_pass() -> None:
    check_op(on(Mirror))
    check_op(
        on(Weighted), world_sizes=[2], expected=lambda ops, xs: [sum(xs) * torch.tensor([[1.0], [2.0]])] * 2
    )


@pytest.mark.parametrize("transport", [None, OwnGroupTransport, Letters])
def test_right_transports_pass(transport: Any) -> None:
    check_transport(transport)


@pytest.mark.processes
def test_the_transport_of_a_process_group_passes() -> None:
    check_transport(backend="gloo", world_size=2)


# ---- wrong ops -------------------------------------------------------------------------------------------------------


class Summed(SameShape):
    """P -> R: the sum, whose adjoint is too small by the number of ranks."""

    verb = "summed"
    src, dst = gm.P, gm.R

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        return wire.sum(x)

    @property
    def adjoint(self) -> LinearOp:
        return Averaged(self.axis, **self.swapped)


class Averaged(Summed):
    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        return super().transfer(x, wire) / self.axis.size

    @property
    def adjoint(self) -> LinearOp:
        return Summed(self.axis, **self.swapped)


class Unadjoint(SameShape):
    """V -> V: a shift whose adjoint goes the same way."""

    verb = "unadjoint"
    src, dst = gm.V, gm.V

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        rank, size = self.axis.rank, self.axis.size
        got = wire.relay(x, (rank + 1) % size, (rank - 1) % size, x.shape)
        assert got is not None
        return got

    @property
    def adjoint(self) -> LinearOp:
        return type(self)(self.axis, **self.swapped)


class Scaled(Mirror):
    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        return super().transfer(x, wire) * 2

    @property
    def adjoint(self) -> LinearOp:
        return Mirror(self.axis, **self.swapped)


class OtherShape(Mirror):
    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape, 1)


class Writes(Mirror):
    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        y = super().transfer(x, wire)
        x.mul_(3)
        return y


class Returns(SameShape):
    verb = "returns"
    src, dst = gm.V, gm.V
    sends = False

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        return x

    @property
    def adjoint(self) -> LinearOp:
        return type(self)(self.axis, **self.swapped)


class Affine(Mirror):
    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        return super().transfer(x, wire) + 1


class Differs(Mirror):
    src, dst = gm.P, gm.R


class Unbatched(Weighted):
    def batched(self) -> LinearOp:
        return self


class InMemoryOrder(Mirror):
    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
        return super().transfer(flat.view(x.shape), wire)


class Lost(Weighted):
    @property
    def adjoint(self) -> LinearOp:
        return type(self)(self.axis, self.dim)


@pytest.mark.parametrize(
    ("op", "law"),
    [
        (Summed, "reverse mode"),
        (Unadjoint, "reverse mode"),
        (Scaled, "the adjoint of the adjoint is the op"),
        (OtherShape, "out_shape"),
        (Writes, "the operand is only read"),
        (Returns, "the result is fresh memory"),
        (Affine, "the op is linear"),
        (Differs, "same bits on every rank"),
        (Unbatched, "batched"),
        (InMemoryOrder, "any strides"),
        (Lost, "the sent dtypes are swapped"),
    ],
)
def test_a_wrong_op_is_caught_by_the_law_that_it_breaks(op: Any, law: str) -> None:
    with pytest.raises(LawError, match=law) as caught:
        check_op(on(op), world_sizes=[3])
    assert op.__name__ in str(caught.value)
    assert caught.value.law in str(caught.value)


def test_an_op_that_means_something_else_is_caught() -> None:
    with pytest.raises(LawError, match="on lists of tensors"):
        check_op(on(Mirror), world_sizes=[3], expected=lambda ops, xs: list(xs))


# ---- wrong transports ------------------------------------------------------------------------------------------------


class Reversed(OwnGroupTransport):
    def exchange(self, *args: Any, **options: Any) -> Tensor:
        return super().exchange(*args, **options).flip(0)


class WritesOperand(OwnGroupTransport):
    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(super().sum(x))


class SumEverywhere(OwnGroupTransport):
    def sum_at(self, x: Tensor, root: int) -> Tensor:
        return self.sum(x)


class OwnOrder(OwnGroupTransport):
    """Adds the other ranks' terms to its own first, so that the ranks round differently."""

    def sum(self, x: Tensor) -> Tensor:
        one = x.contiguous().view(-1)
        parts = self.gather(one, [one.numel()] * self.axis.size).view(self.axis.size, *x.shape)
        total = parts[self.axis.rank].clone()
        for rank in range(self.axis.size):
            total = total if rank == self.axis.rank else total + parts[rank]
        return total


class Deaf(OwnGroupTransport):
    def fetch(self, out: Tensor, peer: int, greeting: str) -> str | None:
        super().fetch(out, peer, greeting)
        return None


BOXES: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {}


class Shares(OwnGroupTransport):
    """Hands the operand itself to the other rank."""

    def relay(self, x: Tensor, to: int | None, source: int | None, shape: Sequence[int]) -> Tensor | None:
        if to is not None:
            BOXES.setdefault((self.axis.rank, to), queue.SimpleQueue()).put(x)
        torch.distributed.barrier()
        return None if source is None else BOXES[source, self.axis.rank].get(timeout=60)


@pytest.mark.parametrize(
    ("transport", "primitive"),
    [
        (Reversed, "exchange"),
        (WritesOperand, "sum"),
        (SumEverywhere, "sum_at"),
        (OwnOrder, "sum: .*same bits on every rank"),
        (Deaf, "fetch"),
        (Shares, "relay"),
    ],
)
def test_a_wrong_transport_is_caught_by_the_primitive_that_is_wrong(transport: Any, primitive: str) -> None:
    with pytest.raises(LawError, match=f"expected  {primitive}"):
        check_transport(transport)


# ---- the meaning -----------------------------------------------------------------------------------------------------


def examples_of(size: int) -> Iterator[tuple[list[LinearOp], list[Tensor]]]:
    for row in REGISTRY:
        for calls in zip(*(row.examples(PlainAxis(rank, size)) for rank in range(size)), strict=True):
            xs = [torch.randn(tuple(shape), dtype=torch.float64) for _, shape in calls]
            yield [op for op, _ in calls], xs


def test_the_meaning_of_every_op_is_what_runs_on_ranks(threads: Ranks) -> None:
    calls = list(examples_of(3))

    def on_each_rank() -> list[Tensor]:
        axis = gm.axis()
        ops = [op for row in REGISTRY for op, _ in row.examples(axis)]
        return [op.apply(xs[axis.rank]) for op, (_, xs) in zip(ops, calls, strict=True)]

    for (ops, xs), *ys in zip(calls, *threads(3)(on_each_rank), strict=True):
        for got, wanted in zip(meaning(ops, xs), ys, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-14, atol=1e-14)


def test_a_message_has_a_meaning_and_a_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    ops = [Receive(PlainAxis(0, 2), 1, (2,)), Send(PlainAxis(1, 2), 0, (2,))]
    y, nothing = meaning(ops, [torch.empty(0), x])
    (y * torch.tensor([2.0, 3.0])).sum().backward()
    assert nothing.shape == (0,)
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 3.0]


def test_ranks_whose_calls_differ_have_no_meaning() -> None:
    row = next(row for row in REGISTRY if row.call == "scan")
    first, second = (row.examples(PlainAxis(rank, 2))[0][0] for rank in range(2))
    with pytest.raises(gm.MismatchError, match=r"ranks 0 wait for parts that no rank sends|do not match"):
        meaning([first, replace(second, axis=PlainAxis(0, 1))], [torch.ones(2), torch.ones(2)])


# ---- the ops stand by themselves -------------------------------------------------------------------------------------


def test_the_ops_load_torch_and_of_the_package_only_types_errors_and_two_helpers(forking: Forking) -> None:
    code = (
        "import sys, types\n"
        "parent = types.ModuleType('gradmesh'); parent.__path__ = [sys.argv[1]]; sys.modules['gradmesh'] = parent\n"
        "from gradmesh.ops.registry import REGISTRY\n"
        "import gradmesh.ops.meaning\n"
        "assert len(REGISTRY) > 20\n"
        "print(*sorted(name for name in sys.modules if name.startswith('gradmesh.') and '.ops' not in name))\n"
    )
    package = str(Path(gm.__file__).parent)
    done = forking.run(code, package)
    assert done.returncode == 0, done.stderr
    allowed = "_util _util.caches _util.dtypes errors types"
    assert done.stdout.split() == [f"gradmesh.{name}" for name in allowed.split()]


def test_a_transport_of_outside_serves_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_transport` without a class takes the one that gradmesh chooses."""
    monkeypatch.setitem(TRANSPORTS, ThreadsGroup, SumEverywhere)
    with pytest.raises(LawError, match="sum_at"):
        check_transport()
