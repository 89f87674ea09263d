"""What a dispatch mode does not see: calls of Functions, backwards, an optimizer's steps, what autograd saves."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradmesh._torch import functorch_active
from gradmesh.checker.recording.backs import Writing
from gradmesh.checker.recording.gradients import address_of
from gradmesh.checker.recording.params import parameters_of, values_after
from gradmesh.checker.recording.recorder import Recorder
from gradmesh.checker.recording.settings import Optimizers
from gradmesh.checker.recording.tape import Called, Hooked, Lost, Over, Param, Root, Step
from gradmesh.ops.base import Op
from gradmesh.type_inference.tracker import memory_of

__all__ = ["watched"]

_OURS = ("torch.", "gradmesh.")


@contextlib.contextmanager
def watched(recorder: Recorder, steps: int, enough: Callable[[], None]) -> Iterator[None]:
    """Tell a recorder what a dispatch mode does not see, and call `enough` after some steps of an optimizer.

    The program goes on after that, unseen, for ranks that take longer to get so far.

    Functions of torch are replaced for as long, since a program may call them from anywhere: `torch.autograd.backward`
    and `grad`, which are asked for by name at every call, and `Function.apply`.
    """
    watcher = _Watcher(recorder, steps, enough)
    recorder.written_by_hand = watcher.writes_itself
    function, backward, grad = torch.autograd.Function, torch.autograd.backward, torch.autograd.grad
    apply = function.__dict__["apply"]
    hooks = (
        register_optimizer_step_pre_hook(watcher.before_step),
        register_optimizer_step_post_hook(watcher.after_step),
    )
    function.apply = classmethod(watcher.applied(apply))  # type: ignore[assignment, method-assign]
    torch.autograd.backward = watcher.start(backward)
    torch.autograd.grad = watcher.asked(grad)
    ddp = torch.nn.parallel.DistributedDataParallel
    communicate = ddp.register_comm_hook
    ddp.register_comm_hook = watcher.communicated(communicate)  # type: ignore[method-assign]
    register, accumulate = Tensor.register_hook, Tensor.register_post_accumulate_grad_hook
    Tensor.register_hook = watcher.hooked(register)  # type: ignore[method-assign]
    Tensor.register_post_accumulate_grad_hook = watcher.accumulated(accumulate)  # type: ignore[method-assign]
    disable, hooked = graph.disable_saved_tensors_hooks, saved_tensors_hooks(watcher.saves, lambda x: x)

    @contextlib.contextmanager
    def without(words: str) -> Iterator[None]:
        """Transforms of torch.func refuse hooks of the program; ours do not hinder them."""
        hooked.__exit__()
        try:
            with disable(words):
                yield
        finally:
            hooked.__enter__()

    graph.disable_saved_tensors_hooks = without  # type: ignore[assignment]
    try:
        with hooked, watcher.optimizers.watched():
            yield
    finally:
        graph.disable_saved_tensors_hooks = disable
        function.apply = apply  # type: ignore[method-assign]
        torch.autograd.backward, torch.autograd.grad = backward, grad
        Tensor.register_hook, Tensor.register_post_accumulate_grad_hook = register, accumulate  # type: ignore[method-assign]
        ddp.register_comm_hook = communicate  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


class _Watcher:
    def __init__(self, recorder: Recorder, steps: int, enough: Callable[[], None]) -> None:
        self._to = recorder
        self._enough = enough
        self._tape = recorder.tape
        self._left = steps
        self._counts: dict[int, float] = {}
        self._step: Step | None = None
        self._held: list[Any] = []
        """The parameters of the optimizer that is stepping."""
        self._nested = 0
        self._returned: dict[int, Tensor] = {}
        self.optimizers = Optimizers(recorder)

    # -- Functions -----------------------------------------------------------------------------------------------

    def applied(self, method: Any) -> Any:
        """`Function.apply`, reported to the recorder; a method in Python or, from torch 2.15 on, in C."""
        to = self._to

        def original(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return method.__get__(None, cls)(*args, **kwargs)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if to.backward or to.stepping or to.quiet or functorch_active():
                return original(cls, *args, **kwargs)
            number = len(self._tape.calls)
            name, begin = f"{cls.__module__}.{cls.__qualname__}", len(self._tape.events)
            to.see_parts(args, {})
            op = getattr(args[0], "op", args[0]) if args else None
            label = f"gm.{op.verb}" if isinstance(op, Op) else cls.__qualname__
            call = Called(number, label, to.site(), [], [], begin, ours=name.startswith(_OURS))
            self._tape.calls[number] = call
            to.calls.append(call)
            try:
                result = original(cls, *args, **kwargs)
            finally:
                to.calls.pop()
            self._over(call, args, result, followed=isinstance(op, Op))
            return result

        return apply

    def _over(self, call: Called, args: tuple[Any, ...], result: Any, *, followed: bool) -> None:
        """A call has been made.

        Args:
            call: what the tape has of it.
            args: what it was given.
            result: what it returned.
            followed: whether it is one of the library's own, which is followed without what it returns beside.
        """
        to = self._to
        call.ins = [to.id_of(x) for x in args if isinstance(x, Tensor)]
        made = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor)]
        for x in made[1:] if followed else ():  # ties calls to one another
            to.constant(x)
        over = Over(call)
        for x in made if not followed else ():
            if to.id_of(x) is None and x.requires_grad and type(x) is Tensor and to.alias(x) is None:
                over.unseen = True
                to.constant(x)
        call.outs = [to.id_of(x) for x in made]
        if not call.ours or over.unseen:
            self._tape.events.append(over)
        node = next((x.grad_fn for x in made if x.grad_fn is not None), None)
        if node is None or to.calls:
            return
        before = [0]
        writing: list[Writing | None] = [None]

        def begins(received: Any) -> None:
            before[0] = to.sends
            with to.unseen():
                call.received = [_copied(g) for g in received]
                plain = all(g is None or type(g) is Tensor for g in received)
                if plain and not call.ours:
                    to.received = call, {address_of(g) for g in received if g is not None}
                if plain and not (call.ours or call.sends):
                    writing[0] = to.writes_back(received)

        def ends(returned: Any, _: Any) -> None:
            call.sends_back = call.sends_back or to.sends > before[0]
            to.received = None
            with to.unseen():
                if call.sends or call.sends_back:
                    call.returned = [_copied(g) for g in returned]
                    to.wrote_back(writing[0], ())
                else:
                    call.received = None
                    call.back = to.wrote_back(writing[0], returned)

        node.register_prehook(begins)
        node.register_hook(ends)

    def communicated(self, original: Any) -> Any:
        """`DistributedDataParallel.register_comm_hook`, whose line is recorded."""

        def register_comm_hook(ddp: Any, *args: Any, **kwargs: Any) -> None:
            self._tape.comm_hook = self._to.site()
            original(ddp, *args, **kwargs)

        return register_comm_hook

    def hooked(self, original: Any) -> Any:
        """`Tensor.register_hook`, with hooks that are reported to the recorder."""
        to = self._to

        def register_hook(x: Tensor, hook: Any) -> Any:
            if to.quiet or functorch_active() or type(x) not in (Tensor, torch.nn.Parameter):
                return original(x, hook)
            of, known, site = weakref.ref(x), to.id_of(x), to.site()

            def run(gradient: Any) -> Any:
                if to.quiet or type(gradient) is not Tensor:
                    return hook(gradient)
                before = to.sends
                with to.unseen():
                    writing = to.writes_back([gradient])
                try:
                    result = hook(gradient)
                except BaseException:
                    to.wrote_back(writing, ())
                    raise
                with to.unseen():
                    back = to.wrote_back(writing, [gradient if result is None else result])
                    tensor = of()
                    number = known if tensor is None else to.id_of(tensor)
                    if number is not None and to.sends != before:
                        self._tape.events.append(Hooked(number, None, site))
                    elif number is not None and back is not None:
                        met, gave = back.met[0], back.gave[0]
                        if (
                            met is None
                            or gave is None
                            or met.shape != gave.shape
                            or not torch.equal(met, gave)
                        ):
                            self._tape.events.append(Hooked(number, back, site))
                return result

            return original(x, run)

        return register_hook

    def accumulated(self, original: Any) -> Any:
        """`Tensor.register_post_accumulate_grad_hook`: what a hook does there is done between backward and step."""
        to = self._to

        def register(x: Tensor, hook: Any) -> Any:
            def run(p: Any) -> Any:
                if to.quiet:
                    return hook(p)
                depth, to.backward = to.backward, 0
                to.gradients.find()
                try:
                    return hook(p)
                finally:
                    to.backward = depth

            return original(x, run)

        return register

    # -- backward ------------------------------------------------------------------------------------------------

    def start(self, original: Any) -> Any:
        """`torch.autograd.backward`, reported to the recorder."""
        to = self._to

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            builds = bool(kwargs.get("create_graph") or (len(args) > 1 and args[1]))
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            given = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors or ())
            if not to.backward and not to.quiet:
                self._root(roots, given)
            if (
                to.writing is not None
            ):  # a Function that computes forward again: parameters get gradients in there
                to.wrote_back(to.writing, ())
            to.backward += not builds
            try:
                original(tensors, grad_tensors, *args, **kwargs)
            finally:
                to.backward -= not builds
            if not to.backward and not to.quiet:
                to.backward_is_over()

        return backward

    def asked(self, original: Any) -> Any:
        """`torch.autograd.grad`, reported to the recorder."""
        to = self._to

        def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            builds = bool(kwargs.get("create_graph") or (len(args) > 1 and args[1]))
            wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            leaves = all(isinstance(x, torch.nn.Parameter) for x in wanted)
            outer = not to.backward and not builds and leaves and not to.quiet
            if outer:
                roots = [outputs] if isinstance(outputs, Tensor) else list(outputs)
                given = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs or ())
                self._root(roots, given)
            to.backward += not builds
            try:
                found = original(outputs, inputs, grad_outputs, *args, **kwargs)
            finally:
                to.backward -= not builds
            if outer:
                self._returned = {id(x): g for x, g in zip(wanted, found, strict=True) if g is not None}
                to.backward_is_over()
                to.made.update(self._returned)
                to.changes.arrives(self._returned.values())
            return found

        return grad

    def _root(self, roots: Sequence[Tensor], given: Sequence[Tensor | None]) -> None:
        to = self._to
        to.backward_begins()
        site = to.site()
        for at, x in enumerate(roots):
            local = getattr(x, "_local_tensor", x)
            weight = given[at] if at < len(given) else None
            number = to.id_of(local)
            if number is None and local.is_leaf:  # the end of a chain of calls, on a rank without a loss
                to.constant(local)
                number = to.id_of(local)
            if number is None:
                self._tape.events.append(Lost("a backward begins at what was not followed", site))
                continue
            passed = weight is not None and to.was_received(weight)
            with to.unseen():
                copy = None if weight is None else getattr(weight, "_local_tensor", weight).detach().clone()
                value = local.detach().clone()
            self._tape.events.append(Root(number, value, copy, passed, site))

    def saves(self, x: Tensor) -> Tensor:
        """Remember where autograd keeps what it needs for backward."""
        if functorch_active():
            return x
        with self._to.unseen():
            kept = x.detach()
        if not self._to.stepping and type(x) is Tensor:
            self._to.saved[memory_of(x)] = weakref.ref(kept)
            self._to.keep(kept)
        return kept

    # -- steps ---------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """Take down what an optimizer is about to use."""
        if self._to.quiet:
            return
        self._nested += 1
        if self._nested > 1:
            return  # an optimizer that calls others
        self._held = [p for group in optimizer.param_groups for p in group["params"]]
        self._take(self._held, manual=False)
        if self._step is not None:
            self._step.optimizer = self.optimizers.number(optimizer)
            with self._to.unseen():
                every = self.optimizers.settings(optimizer)
            for param, settings in zip(self._step.params, every, strict=True):
                param.settings = settings
        self._to.stepping = True

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Take down what it made, and end the program if that was the last."""
        to = self._to
        if to.quiet:
            return
        self._nested -= 1
        if self._nested > 0:
            return
        to.stepping = False
        if self._step is not None:
            with to.unseen():
                values_after(self._step.params, self._held)
        self._held = []
        to.forget()
        self._counted(id(optimizer))

    def writes_itself(self, with_gradients: bool) -> None:
        """The program is about to step without an optimizer."""
        to = self._to
        self._take(to.leaves(), manual=True)
        if self._step is not None:
            self._step.by_gradients = with_gradients
        to.forget()
        # What is not along the gradient may be the way back of a displacement, which an optimizer's step follows.
        self._counted(0, 1.0 if with_gradients else 0.5)

    def _take(self, held: list[Any], *, manual: bool) -> None:
        to = self._to
        to.settle()
        with to.unseen():
            params: list[Param] = parameters_of(
                held, to.modules.names(), to.id_of, self._returned, to.change_of
            )
            buffers, frozen = to.modules.buffers(), to.modules.frozen()
            written = {
                name: to.written_at[address_of(x)]
                for name, x in (*buffers.items(), *frozen.items())
                if address_of(x) in to.written_at
            }
            to.written_at.clear()
            copies = ({name: x.detach().clone() for name, x in each.items()} for each in (buffers, frozen))
            buffers, frozen = copies
        self._step = Step(
            params, buffers, to.site(), manual, to.modules.averaging(), written=written, frozen=frozen
        )
        self._tape.events.append(self._step)
        self._returned = {}

    def _counted(self, optimizer: int, steps: float = 1.0) -> None:
        self._counts[optimizer] = self._counts.get(optimizer, 0.0) + steps
        self._tape.steps = math.ceil(max(self._counts.values()))
        if min(self._counts.values()) >= self._left or self._tape.steps > self._left:
            self._to.quiet = True
            self._enough()


def _copied(gradient: Tensor | None) -> Tensor | None:
    """A copy of a plain tensor; the parts of others are seen elsewhere."""
    return gradient.detach().clone() if type(gradient) is Tensor else None
