"""The chain of the collectives of one `ordered()` block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from gradmesh._torch import (
    backward_pass,
    functorch_active,
    in_reentrant_checkpoint,
    only_vmap_active,
    outside_modes,
    saves_for_a_checkpoint,
)
from gradmesh.autograd import apply_ordered, apply_unordered, compiled_ordered, grad_token
from gradmesh.axis import Axis
from gradmesh.call_sites import Site, call_site, show_site
from gradmesh.errors import OrderError, message
from gradmesh.ops.base import LinearOp, Op
from gradmesh.ops.convert import PartialFromVarying
from gradmesh.overlap.async_nodes import AsyncCollective, finish_ordered, finished, start_ordered, started
from gradmesh.state import rank_state
from gradmesh.transport import compiling, messages

__all__ = ["Order"]

T = TypeVar("T")

_SPARE_TOKEN = outside_modes(grad_token)
"""The first thread of a compiled program, which cannot make a leaf, and that of a recomputed collective: a selective
checkpoint counts what is made."""
_LOCAL_AXIS = Axis("chain", 0, 1, None)  # type: ignore[arg-type]  # nothing is sent
"""The axis of the op that ties a chain to a loss, which is this rank's affair alone."""

_NO_LOSS = outside_modes(lambda: torch.zeros((), device="cpu", requires_grad=True))
"""The loss of a rank that has none, in a compiled program, which cannot make a leaf."""


class Order:
    """The chain of the collectives of one `ordered()` block, on this rank."""

    def __init__(self) -> None:
        self._root: Tensor | None = None
        self._token: Tensor | None = None
        self._count = 0
        self._first: tuple[str, Site] = ("", None)
        self._joined = False
        self._begun: list[AsyncCollective] = []
        self._opened_in = -1 if compiling() else backward_pass()

    @property
    def here(self) -> bool:
        """Whether the caller is in the pass that the block was opened in, and not in a backward pass inside of it."""
        return backward_pass() == self._opened_in

    def link(self, op: LinearOp, x: Tensor) -> Tensor:
        """Run a collective as the next link."""
        if compiling():
            return self._compiled_ordered(op, x)
        if not self.here:
            return self._recompute(op, x)
        y, self._token = apply_ordered(op, x, self._next(op))
        return y

    def node(self, op: LinearOp, run: Callable[[Tensor | None], tuple[T, Tensor]]) -> T:
        """Run what makes several collectives in its backward as one link.

        Args:
            op: one of them, for errors.
            run: makes the node: it takes a thread and passes one on. With None it is no link.
        """
        if self.here:
            y, self._token = run(self._next(op))
            return y
        self.refuse_reentrant(op)
        return run(_SPARE_TOKEN if saves_for_a_checkpoint() else None)[0]

    def begin(self, op: LinearOp, x: Tensor) -> AsyncCollective:
        """Begin a collective as the next link."""
        if not self.here:
            self.refuse_reentrant(op)
            return start_ordered(op, x, _SPARE_TOKEN)[0] if saves_for_a_checkpoint() else started(op, x)
        made, self._token = start_ordered(op, x, self._next(op))
        self._begun.append(made)
        return made

    def end(self, made: AsyncCollective) -> Tensor:
        """Wait for a collective that was begun, as the next link."""
        if not made.call.ordered:
            return finished(made)
        if not self.here:
            return finish_ordered(made, None, _SPARE_TOKEN)[0]
        if made not in self._begun:
            self._refuse_after_join(made.op)
        self._begun.remove(made)
        y, self._token = finish_ordered(made, None, self._next(made.op))
        return y

    def _next(self, op: Op) -> Tensor:
        """The thread for the next link."""
        if functorch_active() and not only_vmap_active():
            raise OrderError(
                message(
                    "a torch.func derivative cannot see the chain",
                    op=op.verb,
                    axis=str(op.axis),
                    expected="autograd inside ordered(), or vmap",
                    got="a transform such as torch.func.grad or jvp around the collective",
                    remedy="use gradmesh.grad or gradmesh.backward, or transform outside of ordered()",
                )
            )
        if self._joined:
            self._refuse_after_join(op)
        if self._token is None:
            self._root = self._token = torch.zeros(1, device="cpu", requires_grad=True)
        if self._count == 0:
            self._first = (op.verb, call_site())
        self._count += 1
        return self._token

    def _compiled_ordered(self, op: LinearOp, x: Tensor) -> Tensor:
        """Run a collective as the next link, in a program that is being compiled."""
        if self._joined:
            self._refuse_after_join(op)
        if self._token is None:
            self._root = self._token = _SPARE_TOKEN
        self._count = max(self._count, 1)  # a number of its own at each call would be a program of its own
        y, self._token = compiled_ordered(op, x, self._token)
        return y

    def _recompute(self, op: LinearOp, x: Tensor) -> Tensor:
        """Run a collective again for a checkpoint: it saves what it saved before, and the chain stays as it is."""
        self.refuse_reentrant(op)
        if not saves_for_a_checkpoint():  # a collective of a hook, which is on no chain
            return apply_unordered(op, x)
        return apply_ordered(op, x, _SPARE_TOKEN)[0]

    def refuse_reentrant(self, op: Op) -> None:
        """Refuse a collective in a reentrant checkpoint: it has no graph there, and some ranks run it again."""
        if in_reentrant_checkpoint():
            raise OrderError(
                message(
                    "a collective is run by a reentrant checkpoint inside ordered()",
                    op=op.verb,
                    axis=str(op.axis),
                    expected="torch.utils.checkpoint with use_reentrant=False",
                    got="use_reentrant=True, which hides the collectives from the chain",
                    remedy="pass use_reentrant=False",
                )
            )

    def keep_place(self) -> None:
        """Have a collective that is no link, in a region of a checkpoint, run again on every rank.

        A region is run again where backward needs what it saved, and it may save nothing on some ranks, or not be used.
        So a link that sends nothing is put behind the collective, whose backward every rank runs.
        """
        with torch.enable_grad():
            tie, nothing = PartialFromVarying(_LOCAL_AXIS), torch.zeros((), device="cpu")
            if not self.here:
                apply_ordered(tie, nothing, _SPARE_TOKEN)
                return
            if self._joined:
                return
            if self._token is None:
                self._root = self._token = torch.zeros(1, device="cpu", requires_grad=True)
            _, self._token = apply_ordered(tie, nothing, self._token)

    def _refuse_after_join(self, op: Op) -> NoReturn:
        raise OrderError(
            message(
                "a collective after the chain was joined",
                op=op.verb,
                axis=str(op.axis),
                expected="join after the last collective",
                got=f"this collective after join, which ended a chain of {self._count}",
                remedy="join later, or use gradmesh.backward(loss), which begins a new chain",
            )
        )

    def join(self, loss: Tensor | None) -> Tensor:
        """Tie the chain to this rank's loss, so that its backward runs every collective's.

        Args:
            loss: this rank's loss; None on a rank that has none.

        Returns:
            The same value, to call `backward` on. Without a loss, a zero.
        """
        if loss is not None and not (
            isinstance(loss, Tensor) and (loss.is_floating_point() or loss.is_complex())
        ):
            raise OrderError(
                message(
                    "the loss is nothing to differentiate",
                    op="join",
                    expected="a floating-point or complex tensor, or None",
                    got=f"{loss.dtype} tensor" if isinstance(loss, Tensor) else repr(loss),
                    remedy="pass None on a rank that has no loss",
                )
            )
        if self._begun:
            self._refuse_started()
        joined = loss
        if joined is None:
            joined = _NO_LOSS if compiling() else torch.zeros((), device="cpu", requires_grad=True)
        # Without grad mode nothing is tied, and the block will say that join is missing.
        if self._token is not None and torch.is_grad_enabled():
            link = compiled_ordered if compiling() else apply_ordered
            joined, _ = link(PartialFromVarying(_LOCAL_AXIS), joined, self._token)
            self._joined = True
        return joined

    def _refuse_started(self) -> NoReturn:
        never = [f"{made.op.verb} {show_site(made.call.site)}" for made in self._begun]
        self._begun.clear()
        rank_state().started.abandon()
        raise OrderError(
            message(
                "join, and a call that was begun is not waited for",
                op="join",
                expected="wait() for each call with async_op=True, before join",
                got="\n".join(never),
                remedy="call wait() where the result is needed, or at the latest before the loss is joined",
            )
        )

    def backward(
        self,
        loss: Tensor | None,
        gradient: Tensor | None = None,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Join the loss and run its backward; the next collective begins a new chain.

        Args:
            loss: this rank's loss; None on a rank that has none.
            gradient: the gradient of a loss that is no scalar.
            retain_graph: as in `torch.Tensor.backward`.
            create_graph: as there; the chain then goes on through the backward pass.
            inputs: as there.
        """
        joined, root = self.join(loss), self._root
        if root is None and not joined.requires_grad and torch.is_grad_enabled():
            return  # this rank had no part in what the others call, and has nothing of its own to differentiate
        # A pass that is told its inputs prunes all other paths, and so the chain.
        leaves = None if inputs is None or root is None else [*_listed(inputs), root]
        with self._following_pass(create_graph, bool(retain_graph)):
            joined.backward(gradient, retain_graph, create_graph, leaves)
            if root is not None and create_graph:
                # Else the root would hold the graph of its own gradient, and both for ever.
                self._token, root.grad = root.grad, None

    def grad(
        self,
        outputs: Tensor | Sequence[Tensor] | None,
        inputs: Tensor | Sequence[Tensor],
        grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        """`torch.autograd.grad` that runs every collective's backward; the next collective begins a new chain.

        Args:
            outputs: what to differentiate; the chain is tied to the first. None on a rank that has nothing.
            inputs: with respect to what.
            grad_outputs: the gradients of the outputs.
            options: as in `torch.autograd.grad`; with create_graph the chain goes on through the backward pass.
        """
        if options.get("is_grads_batched"):
            raise OrderError(
                message(
                    "a chain has one gradient, not a batch of them",
                    op="grad",
                    expected="one pass for each gradient inside ordered()",
                    got="is_grads_batched=True",
                    remedy="loop with retain_graph=True, or take batched gradients outside of ordered()",
                )
            )
        first, *others = _listed(outputs) or (None,)
        wanted, create = _listed(inputs), bool(options.get("create_graph"))
        joined, root = self.join(first), self._root
        with self._following_pass(create, bool(options.get("retain_graph"))):
            if root is None:
                return torch.autograd.grad([joined, *others], wanted, grad_outputs, **options)
            *grads, token = torch.autograd.grad([joined, *others], [*wanted, root], grad_outputs, **options)
            if create:
                self._token = token
            return tuple(grads)

    @contextlib.contextmanager
    def _following_pass(self, create_graph: bool, retain_graph: bool) -> Iterator[None]:
        """Be ready for more collectives after a backward pass, also after one that failed.

        Behind a pass that made a graph the chain goes on where that one ended; a graph that is kept keeps its chain.
        """
        try:
            yield
        except BaseException:
            self._root = self._token = None
            self._begun.clear()
            raise
        else:
            # The pass is over on this rank, so that what it sent can only wait for passes of others.
            messages.settle()
            if not create_graph and not retain_graph:
                self._root = self._token = None
        finally:
            self._count, self._joined = 0, False

    def close(self) -> None:
        """Refuse to end with collectives that no loss was tied to."""
        if self._begun:
            self._refuse_started()
        if self._count and not self._joined:
            verb, site = self._first
            raise OrderError(
                message(
                    "ordered() ended without join",
                    op="ordered",
                    expected="join(loss) or gradmesh.backward(loss) on every rank, also on one without a loss",
                    got=f"a chain of {self._count}, from {verb} {show_site(site)}",
                    remedy="loss = order.join(loss) as the last line of the block, or gradmesh.backward(loss)",
                )
            )


def _listed(tensors: Tensor | Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    return () if tensors is None else (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
