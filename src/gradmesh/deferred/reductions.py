"""Deferred gradient reductions: local gradients that wait for one reduction over the ranks.

What counts is where the forward ran. A call inside a `no_sync` block whose operand is a leaf and whose adjoint sends
gets an entry; its backward adds to the entry and sends nothing. A call outside of the block on the same leaf with the
same op adds to the entry too, and runs the reductions at the end of that backward pass.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from gradmesh._torch import (
    accumulates,
    after_pass,
    backward_pass,
    can_accumulate_later,
    in_backward,
    leaf_behind,
    saves_for_a_checkpoint,
)
from gradmesh.axis import Axis
from gradmesh.call_sites import Site
from gradmesh.deferred.messages import totals
from gradmesh.errors import OrderError, message
from gradmesh.ops.base import LinearOp
from gradmesh.ops.opaque import Traced
from gradmesh.transport.call_checks import DEFERRED, CallRecord

__all__ = ["DeferredReduction", "DeferredReductions"]

T = TypeVar("T")


class DeferredReduction:
    """The deferred reduction of one op on one leaf, over all micro-batches.

    Attributes:
        leaf: the leaf.
        op: the op.
        serial: its number among the entries, the same on every rank.
        site: the call site of the first call.
        grad: this rank's accumulated gradient of the result; None: there was none.
        reached: whether a backward pass has reached it.
    """

    __slots__ = ("grad", "leaf", "op", "reached", "reductions", "serial", "site")

    def __init__(
        self, reductions: DeferredReductions, leaf: Tensor, op: LinearOp, serial: int, site: Site
    ) -> None:
        self.reductions, self.leaf, self.op, self.serial, self.site = reductions, leaf, op, serial, site
        self.grad: Tensor | None = None
        self.reached = False

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
        """Run a call as a node of the graph whose backward may be deferred.

        Args:
            op: the op.
            x: its operand.
            call: the metadata of the call.
            run: makes the call.
        """
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
        known = call.number > 0 or not op.rooted
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

        The reductions of the axis then run at the end of the pass.

        Args:
            node: the call's node of the graph.
            grad: the gradient of its result; None: there is none.

        Returns:
            Whether it was added, so that the node sends and returns nothing.
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
            after_pass(functools.partial(self._take_due, due))
        due.axes.add(entry.op.axis)
        if torch.is_grad_enabled() or not can_accumulate_later(entry.leaf):
            return False
        entry.add(grad)
        return True

    def _take_due(self, due: _Due) -> None:
        self.take(due.axes)

    # -- reduction

    def take(self, axes: set[Axis] | None = None) -> None:
        """Run the reductions and accumulate the results into the leaves.

        Args:
            axes: only those of these axes.
        """
        deferred = [entry for entry in list(self._entries.values()) if axes is None or entry.op.axis in axes]
        deferred.sort(key=lambda entry: entry.serial)
        _refuse_freed(deferred)
        whole: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.no_grad():
            for axis in dict.fromkeys(entry.op.axis for entry in deferred):
                of_axis = [entry for entry in deferred if entry.op.axis == axis]
                calls = [(entry.op, entry.leaf, entry.grad) for entry in of_axis]
                for entry, total in zip(of_axis, totals(calls), strict=True):
                    if total is not None:
                        _, before = whole.get(id(entry.leaf), (None, None))
                        whole[id(entry.leaf)] = (
                            entry.leaf,
                            total if before is None else before.add_(total),
                        )
        self._drop(deferred)
        wanted = []
        for leaf, total in whole.values():
            if leaf.requires_grad:
                wanted.append((leaf, total))
            else:
                _add_to_frozen(leaf, total)
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


def _add_to_frozen(leaf: Tensor, total: Tensor) -> None:
    """Add to `.grad` of a leaf that was frozen since; autograd would skip it."""
    with torch.no_grad():
        if leaf.grad is None:
            leaf.grad = total.clone(memory_format=torch.contiguous_format)
        else:
            leaf.grad.add_(total)


def _refuse_freed(deferred: list[DeferredReduction]) -> None:
    """Raise for parameters whose memory a wrapper has freed."""
    freed = [entry for entry in deferred if entry.leaf.numel() and not entry.leaf.untyped_storage().nbytes()]
    if freed:
        first = freed[0]
        raise OrderError(
            message(
                "the memory of a parameter was freed before its deferred gradient reduction",
                op="no_sync",
                axis=str(first.op.axis),
                expected="parameters whose memory stays allocated until the last micro-batch",
                got=f"{first.op.verb} of a parameter of shape {list(first.leaf.shape)} that a wrapper such as "
                "fully_shard has gathered and freed",
                remedy="for parameters of fully_shard use module.set_requires_gradient_sync(False) instead, and "
                "gradmesh.no_sync for the other parameters",
            )
        )
