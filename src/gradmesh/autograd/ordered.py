"""`ordered()`: the same collectives in the same order on every rank, backward too.

Autograd runs only the backward nodes that a rank's loss reaches. A rank that does not use the output of a collective
skips its backward collective, and the other ranks hang or pair it with another one. Inside `ordered()` each collective
takes the ordering token of the previous one and returns its own, and `join` connects the last token to the loss. So
every rank runs the backward of every collective, in exactly the reverse of the forward order, with a zero gradient
where an output was not used.

An unused output gets zeros instead of no gradient: behind a function whose derivative is infinite, such as sqrt at 0,
the result is NaN.
"""

from __future__ import annotations

import contextlib
import functools
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
    recompute_in,
    saves_for_a_checkpoint,
)
from gradmesh._util.call_sites import Site, call_site, show_site
from gradmesh.autograd.pending import AsyncCollective, finish_ordered, finished, start_ordered, started
from gradmesh.autograd.rule import (
    apply_ordered,
    apply_unordered,
    compiled_ordered,
    grad_token,
    on_device_of,
    token_device,
)
from gradmesh.errors import OrderError
from gradmesh.ops.base import LinearOp, Op
from gradmesh.ops.convert import PartialFromVarying
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.state import rank_state
from gradmesh.transport import compiling, process_group

T = TypeVar("T")

_SPARE_TOKEN = outside_modes(grad_token)
"""The first token of a compiled program, which cannot create a leaf."""


@functools.cache
def _spare_token(device: torch.device) -> Tensor:
    """The token of a recomputed collective, made once, since a selective checkpoint counts created tensors."""
    return outside_modes(lambda: torch.zeros(1, device=device, requires_grad=True))


_LOCAL_AXIS = Axis("chain", 0, 1, None)  # type: ignore[arg-type]  # nothing is sent
"""The axis of the op that connects the token to the loss, which does not communicate."""

_NO_LOSS = outside_modes(lambda: torch.zeros((), device="cpu", requires_grad=True))
"""The loss of a rank that has none, in a compiled program, which cannot create a leaf."""


class Order:
    """The ordered ops of one `ordered()` block, on this rank."""

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
        """Whether the caller is in the pass that the block was opened in, not in a backward pass inside it."""
        return backward_pass() == self._opened_in

    def link(self, op: LinearOp, x: Tensor) -> Tensor:
        """Run a collective as the next ordered op."""
        if compiling():
            return self._compiled_ordered(op, x)
        if not self.here:
            self.refuse_reentrant(op)  # runs again for a checkpoint, without an ordered op
            if not saves_for_a_checkpoint():  # a collective in a hook is not ordered
                return apply_unordered(op, x)
            return apply_ordered(op, x, _spare_token(token_device(x)))[0]
        y, self._token = apply_ordered(op, x, self._next(op, x))
        return y

    def node(self, op: LinearOp, x: Tensor, run: Callable[[Tensor | None], tuple[T, Tensor]]) -> T:
        """Run a node whose backward makes several collectives as one ordered op.

        Args:
            op: one of them, for errors.
            x: an operand.
            run: creates the node: it takes an ordering token and returns one; None: outside of the order.
        """
        if self.here:
            y, self._token = run(self._next(op, x))
            return y
        self.refuse_reentrant(op)
        return run(_spare_token(token_device(x)) if saves_for_a_checkpoint() else None)[0]

    def begin(self, op: LinearOp, x: Tensor) -> AsyncCollective:
        """Start an async collective as the next ordered op."""
        if not self.here:
            self.refuse_reentrant(op)
            return (
                start_ordered(op, x, _spare_token(token_device(x)))[0]
                if saves_for_a_checkpoint()
                else started(op, x)
            )
        made, self._token = start_ordered(op, x, self._next(op, x))
        self._begun.append(made)
        return made

    def end(self, made: AsyncCollective) -> Tensor:
        """Wait for an async collective, as the next ordered op."""
        if not made.call.ordered:
            return finished(made)
        ticket: Any = made.ticket
        if not self.here:
            return finish_ordered(made, None, _spare_token(token_device(ticket)))[0]
        if made not in self._begun:
            self._refuse_after_join(made.op)
        self._begun.remove(made)
        y, self._token = finish_ordered(made, None, self._next(made.op, ticket))
        return y

    def _next(self, op: Op, x: Tensor) -> Tensor:
        """The token for the next ordered op, on the device of its operand."""
        if functorch_active() and not only_vmap_active():
            op.fail(
                "torch.func derivatives are not supported inside ordered()",
                expected="autograd or torch.func.vmap inside ordered()",
                got="torch.func.grad, jvp or another derivative transform around the collective",
                remedy="use gm.grad(outputs, inputs) or gm.backward(loss), or transform outside of ordered()",
                kind=OrderError,
            )
        if self._joined:
            self._refuse_after_join(op)
        if saves_for_a_checkpoint():
            recompute_in(_second_pass)
        if self._token is None:
            self._root = self._token = grad_token(token_device(x))
        if self._count == 0:
            self._first = (op.verb, call_site())
        self._count += 1
        return on_device_of(x, self._token)

    def _compiled_ordered(self, op: LinearOp, x: Tensor) -> Tensor:
        """Run a collective as the next ordered op, in a program that is being compiled."""
        if self._joined:
            self._refuse_after_join(op)
        if self._token is None:
            self._root = self._token = _SPARE_TOKEN
        self._count = max(self._count, 1)  # a counter would make Dynamo recompile at each call
        y, self._token = compiled_ordered(op, x, self._token)
        return y

    def refuse_reentrant(self, op: Op) -> None:
        """Raise in a reentrant checkpoint, where a collective has no graph and only some ranks recompute it."""
        if in_reentrant_checkpoint():
            op.fail(
                "a reentrant checkpoint cannot contain collectives inside ordered()",
                expected="torch.utils.checkpoint with use_reentrant=False",
                got="use_reentrant=True, which hides the collectives from autograd",
                remedy="torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False)",
                kind=OrderError,
            )

    def keep_place(self, device: torch.device) -> None:
        """Make every rank recompute a collective that is not an ordered op, in a checkpointed region.

        A region is recomputed only if backward needs a tensor that it saved, which may differ between ranks. So an
        ordered op that sends nothing follows the collective, and every rank runs its backward.
        """
        with torch.enable_grad():
            tie, nothing = PartialFromVarying(_LOCAL_AXIS), torch.zeros((), device=device)
            if not self.here:
                if self._opened_in == _NEVER:
                    apply_ordered(tie, nothing, _spare_token(token_device(nothing)))
                return
            recompute_in(_second_pass)
            if self._joined:
                return
            if self._token is None:
                self._root = self._token = grad_token(token_device(nothing))
            _, self._token = apply_ordered(tie, nothing, self._token)

    def _refuse_after_join(self, op: Op) -> NoReturn:
        op.fail(
            "collective called after join()",
            expected="join(loss) after the last collective of the ordered() block",
            got=f"this collective after join(), which covered {self._count} collectives",
            remedy="call join(loss) later, or use gm.backward(loss), after which further collectives are allowed",
            kind=OrderError,
        )

    def join(self, loss: Tensor | None) -> Tensor:
        """Connect the collectives of the block to this rank's loss, so that its backward runs all of theirs.

        Args:
            loss: this rank's loss; None on a rank that has none.

        Returns:
            The same value, to call `backward` on. Without a loss, a zero.
        """
        if loss is not None and not (
            isinstance(loss, Tensor) and (loss.is_floating_point() or loss.is_complex())
        ):
            raise OrderError.of(
                "the loss must be a floating-point or complex tensor, or None",
                op="join",
                expected="a floating-point or complex tensor, or None",
                got=f"{loss.dtype} tensor" if isinstance(loss, Tensor) else repr(loss),
                remedy="pass the loss tensor; on a rank without a loss pass None, as in gm.backward(None)",
            )
        if self._begun:
            self._refuse_started()
        joined = loss
        if joined is None:
            joined = _NO_LOSS if compiling() else torch.zeros((), device="cpu", requires_grad=True)
        # Without grad mode nothing is connected, and the block raises at its end.
        if self._token is not None and torch.is_grad_enabled():
            link = compiled_ordered if compiling() else apply_ordered
            joined, _ = link(PartialFromVarying(_LOCAL_AXIS), joined, self._token)
            self._joined = True
        return joined

    def _refuse_started(self) -> NoReturn:
        never = [f"{made.op.verb} {show_site(made.call.site)}" for made in self._begun]
        self._begun.clear()
        rank_state().started.abandon()
        raise OrderError.of(
            "join() called with pending async collectives",
            op="join",
            expected="wait() for each call with async_op=True, before join(), gm.backward() or gm.grad()",
            got="\n".join(never),
            remedy="call y = pending.wait() where the result is needed, at the latest before join()",
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
        """Join the loss and run its backward; further collectives can follow.

        Args:
            loss: this rank's loss; None on a rank that has none.
            gradient: the gradient of a loss that is not a scalar.
            retain_graph: as in `torch.Tensor.backward`.
            create_graph: as there; the collectives of the backward pass are then ordered too.
            inputs: as there.
        """
        joined, root = self.join(loss), self._root
        if root is None and not joined.requires_grad and torch.is_grad_enabled():
            return  # this rank called no collective and has no loss
        # A pass with `inputs` prunes all other paths, including the ordering tokens.
        leaves = None if inputs is None or root is None else [*_listed(inputs), root]
        with self._following_pass(create_graph, bool(retain_graph)):
            joined.backward(gradient, retain_graph, create_graph, leaves)
            if root is not None and create_graph:
                # Without this the root would hold the graph of its own gradient: a reference cycle.
                self._token, root.grad = root.grad, None

    def grad(
        self,
        outputs: Tensor | Sequence[Tensor] | None,
        inputs: Tensor | Sequence[Tensor],
        grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        """`torch.autograd.grad` that runs every collective's backward; further collectives can follow.

        Args:
            outputs: the tensors to differentiate; None on a rank that has none.
            inputs: the tensors with respect to which to differentiate.
            grad_outputs: the gradients of the outputs.
            options: as in `torch.autograd.grad`; with create_graph the backward's collectives are ordered too.
        """
        if options.get("is_grads_batched"):
            raise OrderError.of(
                "is_grads_batched=True is not supported inside ordered()",
                op="grad",
                expected="one backward pass for each gradient",
                got="is_grads_batched=True",
                remedy="loop over the gradients with retain_graph=True, or call torch.autograd.grad(..., "
                "is_grads_batched=True) outside of ordered()",
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
        """Reset for further collectives after a backward pass, also after one that failed.

        With create_graph=True the order continues through the backward pass; with retain_graph=True it is kept.

        The pass runs on the calling thread for every device: autograd's order depends on numbers that each thread
        counts, and a device's thread may have counted otherwise on another rank.
        """
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        except BaseException:
            self._root = self._token = None
            self._begun.clear()
            raise
        else:
            # This rank's pass is over, so waiting for its sends cannot deadlock.
            process_group.settle()
            if not create_graph and not retain_graph:
                self._root = self._token = None
        finally:
            self._count, self._joined = 0, False

    def close(self) -> None:
        """Raise if no loss was joined to the collectives of the block."""
        if self._begun:
            self._refuse_started()
        if self._count and not self._joined:
            verb, site = self._first
            raise OrderError.of(
                "the ordered() block ended without join()",
                op="ordered",
                expected="join(loss), gm.backward(loss) or gm.grad(...) on every rank; None for a missing loss",
                got=f"{self._count} collectives that were not joined, the first: {verb} {show_site(site)}",
                remedy="write loss = gm.join(loss) as the last line of the block, or gm.backward(loss) inside it",
            )


_NEVER = -2
"""In place of a backward pass: of the order in which a checkpointed region of any block is computed again."""


@contextlib.contextmanager
def _second_pass() -> Iterator[None]:
    here = rank_state().of_thread
    around, here.chain = here.chain, Order()
    here.chain._opened_in = _NEVER
    try:
        yield
    finally:
        here.chain = around


def _listed(tensors: Tensor | Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    return () if tensors is None else (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


@contextlib.contextmanager
def ordered() -> Iterator[Order]:
    """Run the backward of all collectives in the block on every rank, in the reverse of their order.

    Every rank has to run the same collectives forward in the same order. Then every rank also runs their backward, on
    all axes together, even if its loss does not use an output, an operand does not require grad on it, or it has no
    loss. A nested block joins the outer one; a block that is opened during a backward pass (in a hook or a Function
    that trains something) is separate. Collectives under `torch.no_grad()`, and those of integers and bools, have no
    backward and are not ordered. After a pass with create_graph=True, a loss computed from its gradients has to be
    joined again. Inside a forward-mode level the collective of a tangent is ordered too, with zeros where a rank has no
    tangent.

    Yields:
        An `Order`, with `join(loss)`; `gm.join`, `gm.backward` and `gm.grad` use the innermost one.

    Raises:
        OrderError: the block ends without `join`, `backward` or `grad`; a collective runs after `join`, in a torch.func
            derivative, or in a reentrant checkpoint.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor([1.0 + gm.axis().rank], requires_grad=True)
        ...     with gm.ordered():
        ...         y = gm.all_gather(x)
        ...         loss = y.sum() if gm.axis().rank == 0 else None  # rank 1 does not use y
        ...         gm.backward(loss)
        ...     return x.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[1.0], [1.0]]
    """
    state = rank_state()
    around = state.of_thread.chain
    if isinstance(around, Order) and (around.here or saves_for_a_checkpoint()):
        yield around
        return
    state.of_thread.chain = order = Order()
    try:
        yield order
        order.close()
    finally:
        state.of_thread.chain = around


def join(loss: Tensor | None) -> Tensor:
    """Connect the collectives of the `ordered()` block to this rank's loss; see `Order.join`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor(2.0, requires_grad=True)
        ...     with gm.ordered():
        ...         y = gm.all_reduce(x, dst=gm.R)
        ...         loss = gm.join(y if gm.axis().rank == 0 else None)
        ...     loss.backward()
        ...     return x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [1.0, 1.0]
    """
    joined = _current("join").join(loss)
    if not compiling() and (check := rank_state().deferred_check) is not None:
        check.flush()
    return joined


def backward(loss: Tensor | None, gradient: Tensor | None = None, **options: Any) -> None:
    """`join` and `loss.backward()` inside an `ordered()` block; see `Order.backward`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor(3.0, requires_grad=True)
        ...     with gm.ordered():
        ...         y = gm.scan(x)
        ...         gm.backward(y if gm.axis().rank == 1 else None)
        ...     return x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [1.0, 1.0]
    """
    _current("backward").backward(loss, gradient, **options)


def grad(
    outputs: Tensor | Sequence[Tensor] | None,
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """`torch.autograd.grad` inside an `ordered()` block; see `Order.grad`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor(3.0, requires_grad=True)
        ...     with gm.ordered():
        ...         energy = gm.all_reduce(x**2, dst=gm.R) * (1 + gm.axis().rank)
        ...         (force,) = gm.grad(energy, x, create_graph=True)
        ...         gm.backward(force if gm.axis().rank == 0 else None)
        ...     return force.item(), x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(18.0, 6.0), (18.0, 0.0)]
    """
    return _current("grad").grad(outputs, inputs, grad_outputs, **options)


def _current(op: str) -> Order:
    chain = rank_state().of_thread.chain
    if not isinstance(chain, Order):
        raise OrderError.of(
            f"gm.{op}() called outside of gm.ordered()",
            op=op,
            expected="a call inside `with gm.ordered():`",
            got="a call outside of it",
            remedy=f"wrap the forward pass and gm.{op}() in `with gm.ordered():`",
        )
    return chain


@contextlib.contextmanager
def reorderable() -> Iterator[None]:
    """Allow the compiler to reorder and bucket the collectives of functions that are compiled in the block.

    Without it a compiled function runs its collectives in program order, forward and backward. Inside the block,
    symmetric collectives become functional collectives, which Inductor may overlap with other work, bucket and reorder.
    Inductor sees the program of one rank only. So you promise that **every rank compiles the same program**: operands
    of the same shapes, no rank-dependent branches or work, and every result used on every rank. If the programs differ,
    ranks may run their collectives in different orders, which gives wrong values or a hang; these calls are not
    compared.

    The setting is read at compile time; a function that was compiled outside of the block is compiled again inside it.
    Other collectives (uneven sizes, `shift`, `scan`, `reduce`, ...) keep their order relative to each other.

    Example:
        >>> def step(x):
        ...     return (gm.all_gather(x) ** 2).sum()
        >>> compiled = torch.compile(step, fullgraph=True)
        >>> with gm.reorderable():
        ...     pass  # loss = compiled(x)
    """
    state = rank_state()
    before, state.reorderable = state.reorderable, True
    try:
        yield
    finally:
        state.reorderable = before
