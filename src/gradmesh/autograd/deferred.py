"""Deferred gradient reductions, `no_sync`: one message per axis for all micro-batches of a step.

Deferred gradient reductions: local gradients that wait for one reduction over the ranks.
What counts is where the forward ran. A call inside a `no_sync` block whose operand is a leaf and whose adjoint sends
gets an entry; its backward adds to the entry and sends nothing. A call outside of the block on the same leaf with the
same op adds to the entry too, and runs the reductions at the end of that backward pass.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradmesh._torch import (
    accumulates,
    after_pass,
    backward_pass,
    can_accumulate_later,
    in_backward,
    leaf_behind,
    saves_for_a_checkpoint,
)
from gradmesh._util.call_sites import Site, show_site
from gradmesh.autograd.traced import Traced
from gradmesh.errors import OrderError
from gradmesh.ops.all_gather import ReduceScatter
from gradmesh.ops.all_reduce import AllReduceInvariant
from gradmesh.ops.base import LinearOp, SameShape
from gradmesh.ops.mean import Mean
from gradmesh.ops.sizes import EQUAL, Sizes
from gradmesh.ops.transport import pack
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.state import rank_state
from gradmesh.transport import compiling, run
from gradmesh.transport.call_checks import DEFERRED, CallRecord


def totals(deferred: list[DeferredReduction]) -> list[Tensor | None]:
    """Run the deferred reductions of one axis; returns each leaf's gradient, None where no rank has one.

    The ranks first compare the reductions and exchange which of them have gradients. Then all gradients of one kind,
    dtype and device are reduced in one message: sums, means, and reduce-scatters with even or uneven sizes, along any
    dim. The adjoints of other ops are sent individually.
    """
    some = _on_any_rank(deferred)
    kinds: dict[Hashable, list[int]] = {}
    for place, each in enumerate(deferred):
        kinds.setdefault(_kind(each, place), []).append(place)
    found: list[Tensor | None] = [None] * len(deferred)
    for places in kinds.values():
        for place, total in zip(places, _combined([deferred[place] for place in places]), strict=True):
            found[place] = total if some[place] else None
    return found


def _on_any_rank(deferred: list[DeferredReduction]) -> list[bool]:
    """For each reduction, whether any rank has a gradient; the ranks also compare the list of reductions."""
    axis, mine = deferred[0].op.axis, [each.grad is not None for each in deferred]
    operand_desc = "; ".join(each.op.describe(each.leaf) for each in deferred)
    count = AllReduceInvariant(axis, operand_desc=f"reductions deferred by no_sync(): {operand_desc}")
    flags = run.constants(mine, run.exchange_device(axis, deferred[0].leaf), torch.int32)
    counts = run.apply(count, flags)
    # Without a CPU backend, a rank with all gradients avoids a device synchronisation.
    return mine if all(mine) else [n > 0 for n in counts.tolist()]


def _kind(each: DeferredReduction, place: int) -> Hashable:
    """The key of reductions that can be sent together."""
    back = each.op.back
    if isinstance(back.op if isinstance(back, Mean) else back, SameShape):
        return back, each.leaf.dtype, each.leaf.device
    if isinstance(back, ReduceScatter):
        even = back.sizes.equal  # separately, as backends are faster with equal parts
        return replace(back, dim=0, sizes=EQUAL), even, each.leaf.dtype, each.leaf.device
    return place


def _combined(deferred: list[DeferredReduction]) -> list[Tensor]:
    """The results of reductions of one kind."""
    grads = [_grad(each) for each in deferred]
    if len(deferred) == 1:
        return [run.apply(deferred[0].op.back, grads[0])]
    if isinstance(deferred[0].op.back, ReduceScatter):
        return _scattered([cast("ReduceScatter", each.op.back) for each in deferred], grads)
    whole = run.apply(deferred[0].op.back, torch.cat([grad.reshape(-1) for grad in grads]))
    return _cut(whole, [grad.shape for grad in grads])


def _grad(each: DeferredReduction) -> Tensor:
    if each.grad is not None:
        return each.grad
    return torch.zeros(each.op.out_shape(each.leaf.shape), dtype=each.leaf.dtype, device=each.leaf.device)


def _scattered(ops: list[ReduceScatter], grads: list[Tensor]) -> list[Tensor]:
    """Several reduce-scatters as one, with each rank's parts of all of them side by side."""
    parts: list[Sequence[Tensor]] = []
    shapes: list[Sequence[int]] = []
    for op, grad in zip(ops, grads, strict=True):
        sizes, lengths, shape = op.layout(grad.shape)
        parts.append(pack(grad, op.dim, sizes).split(list(lengths)))
        shapes.append(shape)
    ranks = range(ops[0].axis.size)
    row = torch.cat([each[rank] for rank in ranks for each in parts])
    counts = tuple(sum(each[rank].numel() for each in parts) for rank in ranks)
    joined = replace(ops[0], dim=0, sizes=EQUAL if ops[0].sizes.equal else Sizes(counts))
    return _cut(run.apply(joined, row), shapes)


def _cut(row: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of the tensors in a flat buffer."""
    parts = row.split([math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


T = TypeVar("T")


class DeferredReduction:
    """The deferred reduction of one op on one leaf, over all micro-batches.

    `serial` is its number among the entries, the same on every rank; `site` the call site of the first call.
    """

    __slots__ = ("grad", "leaf", "op", "reached", "reductions", "serial", "site")

    def __init__(
        self, reductions: DeferredReductions, leaf: Tensor, op: LinearOp, serial: int, site: Site
    ) -> None:
        self.reductions, self.leaf, self.op, self.serial, self.site = reductions, leaf, op, serial, site
        self.grad: Tensor | None = None  # this rank's accumulated gradient of the result
        self.reached = False  # whether a backward pass has reached it

    @property
    def key(self) -> tuple[int, LinearOp]:
        """The key of the entry: leaf and op."""
        return id(self.leaf), self.op

    def defers(self, node: Any, grad: Tensor | None) -> bool:
        """Defer this gradient reduction if the leaf is accumulating; see `DeferredReductions.defers`."""
        _, accumulate = leaf_behind(node)
        if torch.is_grad_enabled() or not accumulates(accumulate) or not can_accumulate_later(self.leaf):
            return False
        self.reductions.put(self, grad)
        return True

    def add(self, grad: Tensor | None) -> None:
        """Add a gradient of the result; None: a pass reached it without one."""
        self.reached = True
        if grad is None:
            return
        if self.grad is None:  # a copy, as other code may hold or modify it
            self.grad = grad.detach().clone(memory_format=torch.contiguous_format)
        else:
            self.grad.add_(grad)


class _Due:
    """The axes whose reductions run at the end of a backward pass."""

    def __init__(self) -> None:
        self.axes: set[Axis] = set()


class DeferredReductions:
    """The deferred reductions of one thread of a rank."""

    def __init__(self) -> None:
        self.open = 0
        """The nesting depth of open blocks."""
        self._entries: dict[tuple[int, LinearOp], DeferredReduction] = {}
        self._serials = itertools.count()
        # Only the pass holds a reference, so a failed pass leaves nothing behind.
        self._due: WeakValueDictionary[int, _Due] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._entries)

    # -- forward

    def recorded(self, op: Any, x: Tensor, call: CallRecord, run: Callable[[], T]) -> T:
        """Run a call as a node of the graph whose backward may be deferred."""
        if (
            call.role
            or not isinstance(op, LinearOp)
            or isinstance(op, Traced)
            or op.axis.size == 1
            or not op.back.sends
        ):
            return run()
        # The backward pass does not run through the nodes of a recomputation.
        if self.open and can_accumulate_later(x) and not (in_backward() and saves_for_a_checkpoint()):
            call.flags |= DEFERRED
        made = run()
        # The root's operand may be the only leaf; the other ranks learn that when calls are compared.
        known = (call.number > 0 and not call.logged) or not op.rooted
        call.deferral = self._enter(x, op, call.site) if known and call.deferred else self
        return made

    def _enter(self, leaf: Tensor, op: LinearOp, site: Site) -> DeferredReduction:
        key = id(leaf), op
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = DeferredReduction(self, leaf, op, next(self._serials), site)
        return entry

    # -- backward

    def put(self, entry: DeferredReduction, grad: Tensor | None) -> None:
        """Add to an entry, also if its reduction has run since the forward."""
        self._entries.setdefault(entry.key, entry).add(grad)

    def defers(self, node: Any, grad: Tensor | None) -> bool:
        """Add the gradient of a call outside of the block to the entry of its leaf and op, if there is one.

        The reductions of the axis then run at the end of the pass. Returns whether it was added, so that the node sends
        and returns nothing.
        """
        if not self._entries:
            return False
        leaf, accumulate = leaf_behind(node)
        entry = None if leaf is None else self._entries.get((id(leaf), node.op))
        if entry is None or not accumulates(accumulate):
            return False
        due = self._due.get(backward_pass())
        if due is None:
            due = self._due[backward_pass()] = _Due()
            after_pass(lambda: self.take(due.axes))
        due.axes.add(entry.op.axis)
        if torch.is_grad_enabled() or not can_accumulate_later(entry.leaf):
            return False
        entry.add(grad)
        return True

    # -- reduction

    def take(self, axes: set[Axis] | None = None) -> None:
        """Run the reductions, of all or of some axes, and accumulate the results into the leaves."""
        deferred = [entry for entry in list(self._entries.values()) if axes is None or entry.op.axis in axes]
        deferred.sort(key=lambda entry: entry.serial)
        _refuse_freed(deferred)
        whole: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.no_grad():
            for axis in dict.fromkeys(entry.op.axis for entry in deferred):
                of_axis = [entry for entry in deferred if entry.op.axis == axis]
                for entry, total in zip(of_axis, totals(of_axis), strict=True):
                    if total is not None:
                        _, before = whole.get(id(entry.leaf), (None, None))
                        whole[id(entry.leaf)] = (entry.leaf, total if before is None else before.add_(total))
        self._drop(deferred)
        wanted = []
        for leaf, total in whole.values():
            if leaf.requires_grad:
                wanted.append((leaf, total))
            else:
                with torch.no_grad():  # it was frozen since; autograd would skip it
                    if leaf.grad is None:
                        leaf.grad = total.clone(memory_format=torch.contiguous_format)
                    else:
                        leaf.grad.add_(total)
        if wanted:
            # They are referenced here and may be views, so torch copies them into .grad.
            torch.autograd.backward([leaf for leaf, _ in wanted], [total for _, total in wanted])

    def clear(self) -> None:
        """Drop everything."""
        self._drop(list(self._entries.values()))

    def _drop(self, entries: list[DeferredReduction]) -> None:
        for entry in entries:
            self._entries.pop(entry.key, None)
            entry.grad, entry.reached = None, False

    def pending(self) -> Iterator[DeferredReduction]:
        """The entries of axes on which a backward pass has deferred a reduction, on this rank or on others."""
        axes = {entry.op.axis for entry in list(self._entries.values()) if entry.reached}
        return (entry for entry in list(self._entries.values()) if entry.op.axis in axes)


def _refuse_freed(deferred: list[DeferredReduction]) -> None:
    """Raise for parameters whose memory a wrapper has freed."""
    freed = [entry for entry in deferred if entry.leaf.numel() and not entry.leaf.untyped_storage().nbytes()]
    if freed:
        first = freed[0]
        raise OrderError.of(
            "the memory of a parameter was freed before its deferred gradient reduction",
            op="no_sync",
            axis=str(first.op.axis),
            expected="parameters whose memory stays allocated until the last micro-batch",
            got=f"{first.op.verb} of a parameter of shape {list(first.leaf.shape)} that a wrapper such as "
            "fully_shard has gathered and freed",
            remedy="for parameters of fully_shard use module.set_requires_gradient_sync(False) instead, and "
            "gradmesh.no_sync for the other parameters",
        )


_SHOWN = 5


class _RankReductions(list[DeferredReductions]):
    """The deferred reductions of all threads of a rank."""


_lock = threading.Lock()
_hooked: list[object] = []


def refuse_steps(reductions: DeferredReductions) -> None:
    """Raise on optimizer steps of this rank while reductions are pending."""
    with _lock:
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_refuse_if_deferred))
            # The closure of an optimizer may defer reductions within the step.
            _hooked.append(register_optimizer_step_post_hook(_refuse_if_deferred))
    state = rank_state()
    of_rank = state.get(_RankReductions) or _RankReductions()
    # Those of finished threads stay until they are empty.
    state.put(
        _RankReductions(
            [*(one for one in of_rank if (one or one.open) and one is not reductions), reductions]
        )
    )


def _refuse_if_deferred(optimizer: Optimizer, *_: Any) -> None:
    of_rank = rank_state().get(_RankReductions)
    if not of_rank or not any(of_rank):
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    deferred = [
        entry for reductions in of_rank for entry in reductions.pending() if id(entry.leaf) in stepped
    ]
    if not deferred:
        return
    shown = [
        f"shape {list(entry.leaf.shape)}: {entry.op.verb} on axis {entry.op.axis} {show_site(entry.site)}"
        for entry in deferred[:_SHOWN]
    ]
    if len(deferred) > _SHOWN:
        shown.append(f"and {len(deferred) - _SHOWN} more")
    raise OrderError.of(
        "optimizer.step() called with deferred gradient reductions pending",
        op="no_sync",
        expected="a last micro-batch whose forward runs outside of no_sync(), before optimizer.step()",
        got="\n".join(shown),
        remedy="run the last micro-batch outside of the block; or use `with gradmesh.no_sync() as deferred:` and "
        "call deferred.sync() to reduce now, or deferred.clear() to drop the gradients",
    )


class DeferredGradients:
    """The reductions that `no_sync` has deferred in this thread of a rank.

    Example:
        >>> def on_each_rank():
        ...     w = torch.nn.Parameter(torch.ones(2))
        ...     with gm.no_sync() as deferred:
        ...         gm.replicate(w).sum().backward()
        ...     before, grad = len(deferred), w.grad
        ...     deferred.sync()
        ...     return before, grad, len(deferred), w.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(1, None, 0, [2.0, 2.0]), (1, None, 0, [2.0, 2.0])]
    """

    def __init__(self, reductions: DeferredReductions) -> None:
        self._reductions = reductions

    def __len__(self) -> int:
        """The number of deferred reductions: pairs of a leaf and an op."""
        return len(self._reductions)

    def sync(self) -> None:
        """Run the reductions now, on every rank, and add the results to `.grad`.

        For loops that only learn after a micro-batch that it was the last one.

        Raises:
            MismatchError: the ranks have deferred different reductions.
        """
        self._reductions.take()

    def clear(self) -> None:
        """Drop the deferred gradients, on every rank, as for a skipped step. `zero_grad` does not drop them."""
        self._reductions.clear()


@contextlib.contextmanager
def no_sync() -> Iterator[DeferredGradients]:
    """Defer the gradient reductions of parameters until the last micro-batch, as DDP's `no_sync` does.

    ::

        for micro-batches 1 to k - 1, inside:   w.grad is unchanged; this rank's gradients are accumulated
        for micro-batch k, outside:             w.grad += the reduction over the ranks of all k gradients

    What counts is where the forward ran. Inside the block, a linear verb that is applied to an `nn.Parameter`
    (`replicate`, `broadcast`, `all_gather` of a parameter's shard, ...) sends nothing in backward. The first backward
    pass through such a call on the same parameter that was made outside runs the deferred reductions of the axis at its
    end, those of one kind in one message. Gradients equal those without the block up to rounding, with 1/k of the
    bytes. Not deferred, but reduced immediately:

    * tensors that are not parameters, such as a pipeline stage's input, whose `.grad` may be read inside the block;
    * tensors that are not leaves, such as `w * 2` or a list of parameters in one call;
    * calls with `async_op=True`, gradients of `torch.autograd.grad`, passes with `create_graph=True`, torch.func
      transforms and compiled programs;
    * parameters with hooks, and all parameters in DDP.

    Every rank has to enter the block. Until the reductions run, the gradient of each call's result is kept in memory:
    for an `all_gather` it has the size of the gathered tensor. An optimizer step on a parameter with deferred
    reductions raises `OrderError`. `zero_grad` clears `.grad` only.

    Yields:
        The deferred reductions, with `sync()` to run them now and `clear()` to drop them.

    Raises:
        OrderError: an optimizer steps while reductions are deferred, or the block is entered inside torch.compile.

    Example:
        >>> def on_each_rank():
        ...     w = torch.nn.Parameter(torch.ones(1))
        ...     for step in range(3):
        ...         with gm.no_sync() if step < 2 else contextlib.nullcontext():
        ...             loss = (gm.replicate(w) * (step + gm.rank())).sum()
        ...         loss.backward()
        ...     return w.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [9.0, 9.0]
    """
    if compiling():
        raise OrderError.of(
            "no_sync() is not supported inside torch.compile",
            op="no_sync",
            expected="the block around the call of the compiled function",
            got="the block inside it",
            remedy="write `with gradmesh.no_sync(): loss = compiled(x)`; reductions of the compiled function run "
            "immediately, with correct gradients",
        )
    state = rank_state()
    known = state.of_thread.deferred
    state.of_thread.deferred = reductions = (
        known if isinstance(known, DeferredReductions) else DeferredReductions()
    )
    refuse_steps(reductions)
    reductions.open += 1
    try:
        yield DeferredGradients(reductions)
    finally:
        reductions.open -= 1
