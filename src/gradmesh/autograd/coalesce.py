"""`coalesce`: many small collectives as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradmesh._util.call_sites import Site, call_site, show_site
from gradmesh._util.structure import cut, cut_by_rank
from gradmesh.autograd.pending import Pending, start_op, version
from gradmesh.errors import OrderError, message, refused_wait
from gradmesh.ops.all_gather import AllGather
from gradmesh.ops.base import Op, SameShape
from gradmesh.ops.mean import Mean
from gradmesh.ops.permute import Route
from gradmesh.ops.shard import AllGatherInvariant
from gradmesh.ops.sizes import EQUAL
from gradmesh.runtime.mesh import Axis, AxisLike, resolve
from gradmesh.runtime.state import rank_state

_Gathers = AllGather | AllGatherInvariant


class _Message:
    """One call that was sent for several coalesced calls; `cut` splits its result into theirs."""

    def __init__(self, pending: Pending[Tensor], cut: Callable[[Tensor], list[Tensor]]) -> None:
        self.pending = pending
        self._cut, self._parts = cut, list[Tensor]()

    def part(self, number: int) -> Tensor:
        """The result of one of them."""
        if not self._parts:
            self._parts = self._cut(self.pending.wait())
        return self._parts[number]

    def future(self, number: int, then: Callable[[Tensor], Any]) -> torch.futures.Future[Any]:
        """A future of the result of one of them, after `then`."""
        return self.pending.future().then(lambda done: then(self._cut(done.value())[number]))


@dataclass(eq=False)
class _Member:
    """One coalesced call."""

    op: Op
    x: Tensor  # its operand
    version: int  # the operand's version counter at the call
    site: Site  # its call site
    recorded: bool  # whether grad mode was on
    sent: tuple[_Message, int] | None = None  # the message, once sent, and the position in it
    number: int = -1  # the number of its `Pending`
    # reason the message was not sent
    refused: str = "wait() inside the block, which sends its message at the end"

    def wait(self) -> Tensor:
        sent, number = self._message()
        return sent.part(number)

    def future(self, then: Callable[[Tensor], Any]) -> torch.futures.Future[Any]:
        """A future of the result's value."""
        sent, number = self._message()
        return sent.future(number, then)

    def over(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self.sent is None or self.sent[0].pending.done()

    def _message(self) -> tuple[_Message, int]:
        if self.sent is None:
            raise refused_wait(
                message(
                    "the coalesced call was not sent",
                    op=self.op.verb,
                    axis=str(self.op.axis),
                    expected="wait() after the gradmesh.coalesce() block",
                    got=f"{self.refused}; called {show_site(self.site)}",
                    remedy="call wait() after the block",
                )
            )
        return self.sent


@dataclass
class Coalescing:
    """The calls of one `coalesce` block on this rank."""

    axis: Axis
    members: list[_Member] = field(default_factory=list)

    def takes(self, op: Op) -> bool:
        """Whether a call can be coalesced: elementwise ops, and gathers of equal sizes."""
        plain = op.op if isinstance(op, Mean) else op
        whole = (
            isinstance(plain, SameShape)
            or (isinstance(plain, Route) and plain.extents is None)
            or (isinstance(plain, _Gathers) and plain.sizes.equal)
        )
        return whole and (op.sends or op.sends_back) and op.axis.global_ranks == self.axis.global_ranks

    def add(self, op: Op, x: Tensor, then: Callable[[Tensor], Any]) -> Pending[Any]:
        """Add a call to the message."""
        member = _Member(op, x, version(x), call_site(), torch.is_grad_enabled())
        self.members.append(member)
        pending: Pending[Any] = Pending(
            op.verb,
            str(op.axis),
            lambda: then(member.wait()),
            future=lambda: member.future(then),
            over=member.over,
            recording=member.recorded and x.requires_grad,
        )
        member.number = pending._number
        return pending

    def refuse(self) -> None:
        """Drop the calls that were not sent, after an error."""
        for member in self.members:
            if member.sent is not None:
                continue
            member.refused = "the block raised an error before it sent its message"
            rank_state().started.drop(member.number)

    def send(self) -> None:
        """Start one call for each kind and dtype."""
        groups: dict[Any, list[_Member]] = {}
        for member in self.members:
            if version(member.x) != member.version:
                member.op.fail(
                    "the operand of a coalesced call was modified in place before the end of the block",
                    expected="an operand that is only read until the block ends",
                    got=f"an in-place write after the call {show_site(member.site)}",
                    remedy="pass a copy, x.clone(), or write to x after the block",
                    kind=OrderError,
                )
            kind = _of_many(member.op, None)
            key = type(kind), kind, member.x.dtype, member.x.device, member.recorded
            groups.setdefault(key, []).append(member)
        for (_, kind, _, _, recorded), members in groups.items():
            with torch.set_grad_enabled(recorded):
                self._send(kind, members)

    def _send(self, kind: Op, members: list[_Member]) -> None:
        tensors = [member.x for member in members]
        words = ", ".join(
            f"{member.op.operand_desc or ''}{list(member.x.shape)}{_dim(member.op)}" for member in members
        )
        flat = torch.cat([x.reshape(-1) for x in tensors])
        pending = start_op(_of_many(kind, words), flat)
        dims = [_plain(member.op).dim for member in members if isinstance(_plain(member.op), _Gathers)]
        like = [x.detach() for x in tensors]  # for the shapes
        sent = _Message(
            pending,
            lambda whole: cut_by_rank(whole, like, dims, kind.axis.size) if dims else cut(whole, like),
        )
        pending._mark_waited()  # the coalesced calls are waited for instead
        for number, member in enumerate(members):
            member.sent = sent, number


def _plain(op: Op) -> Any:
    return op.op if isinstance(op, Mean) else op


def _dim(op: Op) -> str:
    plain = _plain(op)
    return f" along {plain.dim}" if isinstance(plain, _Gathers) else ""


def _of_many(op: Op, operand_desc: str | None) -> Op:
    """The op for several operands as one flat operand."""
    if isinstance(op, Mean):
        return Mean(_of_many(op.op, operand_desc))  # type: ignore[arg-type]  # linear, as `op.op` is
    if isinstance(op, _Gathers):
        return replace(op, dim=0, sizes=EQUAL, operand_desc=operand_desc)
    return replace(op, operand_desc=operand_desc)


@contextlib.contextmanager
def coalesce(axis: AxisLike = None) -> Iterator[None]:
    """Send the async collectives of the block as one message for each kind and dtype, backward too.

    It coalesces calls on the axis with `async_op=True` of `all_reduce`, `all_gather` of equal sizes, `broadcast`,
    `replicate`, `reduce`, `shift`, `permute`, `scan` and `exscan`. Other calls are started individually. The message is
    sent at the end of the block; call `wait()` after it.

    Args:
        axis: the ranks, as in every verb.

    Raises:
        OrderError: `wait()` inside the block; an operand that is modified in place there after its call.
        MismatchError: raised by `wait()` if the ranks' calls in the block do not match.

    Example:
        >>> def on_each_rank():
        ...     x, y = torch.ones(2, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
        ...     with gm.coalesce():
        ...         a = gm.all_reduce(x, dst=gm.R, async_op=True)
        ...         b = gm.all_reduce(y, dst=gm.R, async_op=True)
        ...     (a.wait().sum() * b.wait().sum()).backward()
        ...     return x.grad.tolist(), y.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [([24.0, 24.0], [8.0, 8.0, 8.0]), ([24.0, 24.0], [8.0, 8.0, 8.0])]
    """
    state = rank_state()
    around = state.of_thread.coalescing
    state.of_thread.coalescing = block = Coalescing(resolve(axis, "coalesce"))
    try:
        try:
            yield
        finally:
            state.of_thread.coalescing = around
        block.send()
    except BaseException:
        block.refuse()
        raise
