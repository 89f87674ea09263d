"""What a dispatch mode does not see: calls of Functions, backwards, an optimizer's steps, what autograd saves."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import itertools
import math
import os
import pickle
import re
import runpy
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import convert_parameters
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradmesh._torch import functorch_active
from gradmesh._torch.operators import local_part
from gradmesh._util.call_sites import is_of_the_program, user_frame
from gradmesh.autograd.averaging import instances_of
from gradmesh.autograd.traced import subclasses
from gradmesh.checker.observed import Samplers, annotated, forget_overwritten, replaced
from gradmesh.checker.recorder import Recorder, Verbs, Writing
from gradmesh.checker.trace import (
    SUMMED_IN_STEP,
    Called,
    Changed,
    Hooked,
    Lost,
    Modules,
    Op,
    Over,
    Param,
    Plateau,
    Root,
    Scaled,
    Sent,
    Settings,
    Step,
    Tape,
    address_of,
    gradient_of,
    is_multiple,
    most_memory,
    parameters_of,
    refs,
    values_after,
)
from gradmesh.launch.process_ranks import seed_anew
from gradmesh.ops.base import LinearOp
from gradmesh.ops.base import Op as LibraryOp
from gradmesh.runtime.state import installed
from gradmesh.type_inference.tracker import memory_of
from gradmesh.types import Type

_OF_THE_CODE = {"foreach", "fused", "capturable", "differentiable"}
"""Settings that select an implementation and not a result."""
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "swa_lr"}
"""What schedulers keep in a group and compute the rate from."""


class Optimizers:
    """The optimizers of a rank, with the lines that made them and that changed their settings.

    The recorder gives the lines; its tape takes the values that a `ReduceLROnPlateau` is given.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._to = recorder
        self._numbers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._made: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._scheduled: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._plateaus: WeakKeyDictionary[Any, Plateau] = WeakKeyDictionary()
        self._nested = 0

    def number(self, optimizer: Optimizer) -> int:
        """A number that stands for the optimizer on the tape: they are counted as they are made."""
        return self._numbers.setdefault(optimizer, len(self._numbers))

    def settings(self, optimizer: Optimizer) -> list[Settings]:
        """The settings of each parameter of an optimizer, in the order of its groups."""
        known = (set(getattr(optimizer, "defaults", ())) | _OF_SCHEDULERS) - _OF_THE_CODE
        made, scheduled = self._made.get(optimizer, -1), self._scheduled.get(optimizer, -1)
        found = []
        for group in optimizer.param_groups:
            values = {key: _numbers(group[key]) for key in sorted(known.intersection(group))}
            own = Settings({key: x for key, x in values.items() if x is not None}, made, scheduled)
            found += [own] * len(group["params"])
        return found

    def watched(self) -> AbstractContextManager[None]:
        """Replace the methods of torch that make and schedule optimizers, so that their lines are recorded."""
        plateau = lr_scheduler.ReduceLROnPlateau
        scheduler = lr_scheduler.LRScheduler  # of torch and of the program, as far as they are defined
        kinds = dict.fromkeys((scheduler, *subclasses(scheduler)))
        steps = [(kind, kind.__dict__["step"]) for kind in kinds if "step" in kind.__dict__]
        return replaced(
            (Optimizer, "__init__", self._makes(Optimizer.__init__)),
            (plateau, "__init__", self._makes_plateau(plateau.__init__)),
            *((kind, "step", self._schedules(step)) for kind, step in steps),
        )

    def _makes(self, original: Any) -> Any:
        @functools.wraps(original)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if not self._to.quiet:
                self._to.has_optimizer = True
                self.number(optimizer)
                self._made[optimizer] = self._to.site()
            original(optimizer, *args, **kwargs)

        return init

    def _makes_plateau(self, original: Any) -> Any:
        @functools.wraps(original)
        def init(scheduler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if not self._to.quiet:
                made = Plateau(self.number(optimizer), self._to.site())
                self._plateaus[scheduler] = made
                self._to.tape.plateaus.append(made)
            original(scheduler, optimizer, *args, **kwargs)

        return init

    def _schedules(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = getattr(scheduler, "optimizer", None)
            if not self._to.quiet and isinstance(optimizer, Optimizer):
                self._scheduled[optimizer] = self._to.site()
            plateau = self._plateaus.get(scheduler)
            if plateau is not None and not self._to.quiet:
                given = args[0] if args else kwargs.get("metrics")
                with contextlib.suppress(TypeError, ValueError, RuntimeError), self._to.unseen():
                    plateau.given.append((float(given), self._to.site()))  # type: ignore[arg-type]
            return original(scheduler, *args, **kwargs)

        return step


def _numbers(value: Any) -> tuple[float, ...] | None:
    """A setting as numbers; None if it is anything else."""
    if isinstance(value, Tensor):
        return (float(value),) if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, (int, float)):
        return (float(value),)
    if isinstance(value, (list, tuple)) and value:
        parts = [_numbers(each) for each in value]
        return tuple(x for part in parts if part for x in part) if all(parts) else None
    return None


_OURS = ("torch.", "gradmesh.")


@contextlib.contextmanager
def watched(
    recorder: Recorder,
    steps: int,
    enough: Callable[[], None],
    second_epoch: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Tell a recorder what a dispatch mode does not see, and call `enough` after some steps of an optimizer.

    The program goes on after that, unseen, for ranks that take longer to get so far.

    Functions of torch are replaced for as long, since a program may call them from anywhere: `torch.autograd.backward`
    and `grad`, which are asked for by name at every call, and `Function.apply`.
    """
    watcher = _Watcher(recorder, steps, enough, second_epoch)
    recorder.written_by_hand, recorder.renews = watcher.writes_itself, watcher.renews
    recorder.writes_left_over = watcher.writes_left_over
    hooks = (
        register_optimizer_step_pre_hook(watcher.before_step),
        register_optimizer_step_post_hook(watcher.after_step),
    )
    autograd, function = torch.autograd, torch.autograd.Function
    pipelines: Any = sys.modules.get("torch.distributed.pipelining.stage", graph)
    ddp, disable = DistributedDataParallel, graph.disable_saved_tensors_hooks
    hooked = saved_tensors_hooks(watcher.saves, lambda x: x)

    @contextlib.contextmanager
    def without(words: str) -> Iterator[None]:
        """Transforms of torch.func refuse hooks of the program; ours do not hinder them."""
        watcher.transforms()
        hooked.__exit__()
        try:
            with disable(words):
                yield
        finally:
            hooked.__enter__()

    torch.nn.Parameter.data = property(Tensor.data.__get__, watcher.assigns)  # type: ignore[assignment, attr-defined]
    try:
        with (
            replaced(
                (function, "apply", classmethod(watcher.applied(function.__dict__["apply"]))),
                (autograd, "backward", watcher.start(autograd.backward)),
                (autograd, "grad", watcher.asked(autograd.grad)),
                (ddp, "register_comm_hook", watcher.communicated(ddp.register_comm_hook)),
                (Tensor, "register_hook", watcher.hooked(Tensor.register_hook)),
                (
                    Tensor,
                    "register_post_accumulate_grad_hook",
                    watcher.accumulated(Tensor.register_post_accumulate_grad_hook),
                ),
                (graph, "disable_saved_tensors_hooks", without),
                # Pipelines of torch 2.15 keep the edge of an output, and begin there.
                *(
                    (holder, "get_gradient_edge", watcher.edge_of(graph.get_gradient_edge))
                    for holder in {graph, pipelines}
                    if hasattr(holder, "get_gradient_edge")
                ),
            ),
            annotated(recorder.tape, recorder.site, recorder.unseen),
            hooked,
            watcher.optimizers.watched(),
            watcher.samplers.watched(),
            recorder.handles.watched(),
        ):
            yield
    finally:
        del torch.nn.Parameter.data
        for hook in hooks:
            hook.remove()


_OF_CUSTOM_OP = "GeneratedBackwardFor_"
"""What torch.library calls the Function of an operator with a backward."""

_SUMMING_HOOKS = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)
"""torch's communication hooks that average, but for the rounding of what is sent."""


class _Watcher:
    def __init__(
        self, recorder: Recorder, steps: int, enough: Callable[[], None], second_epoch: Callable[[], None]
    ) -> None:
        self._to = recorder
        self._enough = enough
        self._tape = recorder.tape
        self._left = steps
        self._counts: dict[int, float] = {}
        self._step: Step | None = None
        self._held: list[Any] = []
        """The parameters of the optimizer that is stepping."""
        self._nested = self._sends = 0
        self._transformed = -1
        self._renewed: tuple[Step, list[weakref.ref[Tensor]]] | None = None
        """The last step that makes new parameters, with those before it."""
        self._begins: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._returned: dict[int, Tensor] = {}
        """Gradients that the program asked for since the last step, by the identity of the parameter, and"""
        self._asked: dict[int, Tensor] = {}
        """those of that step."""
        self._written: dict[int, tuple[int, Any]] = {}
        """The parameters that a step of the program's own has not written to so far, by their addresses."""
        self._edges: dict[tuple[Any, int], Tensor] = {}
        """The tensors of the gradient edges that the program has got since the last step."""
        self.optimizers = Optimizers(recorder)
        self.samplers = Samplers(recorder.tape, recorder.site, second_epoch)

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
            operator = cls.__qualname__.removeprefix(_OF_CUSTOM_OP)
            label = f"gm.{op.verb}" if isinstance(op, LibraryOp) else operator
            registered = operator != cls.__qualname__ and not operator.startswith(to.namespaces)
            ours = name.startswith(_OURS) and not registered
            call = Called(number, label, to.site(), [], [], begin, ours=ours)
            call.invariant = isinstance(op, LinearOp) and op.dst is Type.I
            self._tape.calls[number] = call
            to.calls.append(call)
            try:
                result = original(cls, *args, **kwargs)
            finally:
                to.calls.pop()
            self._over(call, args, result, followed=isinstance(op, LibraryOp))
            return result

        return apply

    def _over(self, call: Called, args: tuple[Any, ...], result: Any, *, followed: bool) -> None:
        """A call has been made; of one of the library's own what it returns beside its result is not followed."""
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
                # Of several backwards it has the last one's gradients.
                call.invariant = call.invariant and call.received is None
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
            hook = kwargs.get("hook", args[-1] if args else None)
            self._tape.compresses = hook not in _SUMMING_HOOKS
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
            roots = self._ends_of(tensors)
            given = [grad_tensors] if isinstance(grad_tensors, Tensor) else list(grad_tensors or ())
            if not to.backward and not to.quiet:
                self._ends()
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
            wanted = [inputs] if isinstance(inputs, Tensor | GradientEdge) else list(inputs)
            leaves = all(isinstance(x, torch.nn.Parameter) for x in wanted)
            if not (leaves or to.has_optimizer or to.quiet):  # what is asked for may be all there is to train
                ran = (e for e in self._tape.events if isinstance(e, Op) and e.name != "aten.detach.default")
                used = {number for e in ran for number in refs(e)}
                every = {id(x) for x in to.leaves() if to.id_of(x) in used}
                leaves = bool(every) and every == {id(x) for x in wanted}
            if not to.backward and not to.quiet:
                self._ends()
            outer = not to.backward and not builds and leaves and not to.quiet
            if outer:
                roots = self._ends_of(outputs)
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

    def transforms(self) -> None:
        """A transform of torch.func computes a derivative, which no operator that is seen leads back from."""
        if not self._to.quiet:
            self._transformed = self._to.site()

    def edge_of(self, original: Any) -> Any:
        """`torch.autograd.graph.get_gradient_edge`: a backward may begin at an edge whose tensor is gone."""

        def get_gradient_edge(tensor: Any) -> Any:
            edge = original(tensor)
            if not (self._to.quiet or tensor.is_leaf):
                self._edges[edge.node, edge.output_nr] = tensor
            return edge

        return get_gradient_edge

    def _ends_of(self, given: Any) -> list[Tensor | None]:
        """The tensors at which a backward begins; None: that of an edge which is not known."""
        every = [given] if isinstance(given, Tensor | GradientEdge) else list(given)
        return [self._edges.get((x[0], x[1])) if isinstance(x, GradientEdge) else x for x in every]

    def _root(self, roots: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        to = self._to
        if to.stepping:
            return  # the closure is called again
        to.backward_begins()
        site = to.site()
        for at, x in enumerate(roots):
            local = x if x is None else local_part(x)
            weight = given[at] if at < len(given) else None
            number = None if local is None else to.id_of(local)
            if number is None and local is not None and local.is_leaf:
                to.constant(local)  # the end of a chain of calls, on a rank without a loss
                number = to.id_of(local)
            if number is None or local is None:
                self._tape.events.append(Lost("a backward begins at what was not followed", site))
                continue
            passed = weight is not None and to.was_received(weight)
            with to.unseen():
                copy = None if weight is None else local_part(weight).detach().clone()
                value = local.detach().clone()
                idle = not self._tape.steps
                held = {
                    name: p.detach().clone() for name, p in to.parameters() if type(p) is torch.nn.Parameter
                }
            self._tape.events.append(Root(number, value, copy, passed, site, held if idle else {}))

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
        """Take down what an optimizer is about to use, behind the program's own hooks, which may change gradients."""
        if self._to.quiet:
            return
        if optimizer in self._begins:
            self._begins.pop(optimizer).remove()
        self._begins[optimizer] = optimizer.register_step_pre_hook(self._begins_step)

    def _begins_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        to = self._to
        if to.quiet:
            return None
        self._nested += 1
        if self._nested > 1:
            return None  # an optimizer that calls others
        given = inspect.signature(type(optimizer).step).bind_partial(*args, **kwargs)
        closure = given.arguments.get("closure")
        before = self._asked, self._returned, self._written, self._transformed, dict(to.written_at)
        self._steps(optimizer)
        if closure is None:
            return None
        own = self._step

        @functools.wraps(closure)
        def evaluated(*inner: Any, **named: Any) -> Any:
            # An optimizer that has written nothing yet is about to use the gradients that the closure leaves.
            anew = own is not None and self._step is own and to.stepping and self._is_unwritten(own)
            if anew:
                self._tape.events[:] = [event for event in self._tape.events if event is not own]
                self._asked, self._returned, self._written, self._transformed, written = before
                to.written_at.update(written)
                self._nested, to.stepping = 0, False
            try:
                loss = closure(*inner, **named)
            except BaseException:
                self._nested, to.stepping = 0, False
                raise
            if anew:
                self._nested = 1
                self._steps(optimizer)
            return loss

        given.arguments["closure"] = evaluated
        return given.args, given.kwargs

    def _is_unwritten(self, step: Step) -> bool:
        with self._to.unseen():
            pairs = zip(step.params, self._held, strict=True)
            return all(param.whole or torch.equal(param.value, local_part(p).detach()) for param, p in pairs)

    def _steps(self, optimizer: Any) -> None:
        self._held = [p for group in optimizer.param_groups for p in group["params"]]
        self._take(self._held, manual=False)
        if self._step is not None:
            self._step.optimizer = self.optimizers.number(optimizer)
            with self._to.unseen():
                every = self.optimizers.settings(optimizer)
            for param, settings in zip(self._step.params, every, strict=True):
                param.settings = settings
        with self._to.unseen():
            self._to.mixing.begins(self._held, optimizer.state)
        self._sends, self._to.summed_in_step = self._to.sends, -1
        self._to.stepping = True

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Take down what it made, and end the program if that was the last."""
        to = self._to
        if to.quiet:
            return
        self._nested = max(self._nested - 1, 0)
        if self._nested > 0 or not to.stepping:
            return
        to.stepping = False
        if self._step is not None:
            with to.unseen():
                values_after(self._step.params, self._held)
            if to.summed_in_step >= 0 and not type(optimizer).__module__.startswith("torch."):
                for param in self._step.params:
                    param.changed = Changed(SUMMED_IN_STEP, to.summed_in_step)
            if to.sends == self._sends:
                mixed = to.mixing.mixed.items()
                self._step.mixed = {self._step.params[at].name: what for at, what in mixed}
        stepped = {id(p) for p in self._held}
        left = [
            p
            for p in to.leaves()
            if id(p) in to.made and id(p) not in stepped and type(p) is torch.nn.Parameter
        ]
        to.left_over |= {address_of(p): (p, to.id_of(p)) for p in left}
        for p in self._held:
            to.left_over.pop(address_of(p), None)
        self._held = []
        to.forget()
        self._counted(id(optimizer))

    def assigns(self, p: Any, value: Any) -> None:
        """`p.data = value`, which no operator shows; also where torch makes parameters of a vector for the program."""
        to, file = self._to, sys._getframe(1).f_code.co_filename
        ours = is_of_the_program(file) or file == convert_parameters.__file__
        sees = ours and type(value) is Tensor and not (to.quiet or to.stepping or to.backward)
        if sees and address_of(value) != address_of(p):  # `p.data -= x` has been seen
            to.writes(p, [value])
        Tensor.data.__set__(p, value)  # type: ignore[attr-defined]
        if p in to.modules.registered:
            to.modules.at[address_of(p)] = weakref.ref(p)

    def writes_itself(self, x: Tensor, of_gradient: bool | None) -> bool:
        """The program is about to write to a tensor: whether that is its own step, the first write or a later one.

        `of_gradient` says whether it becomes what its gradient alone makes of it; None where no gradient is new.
        """
        to = self._to
        if of_gradient is not None:
            held = to.leaves()
            self._take(held, manual=True)
            if self._step is not None:
                self._step.by_gradients = of_gradient
                with to.unseen():
                    for param, p in zip(self._step.params, held, strict=True):
                        param.copied = to.modules.is_copied(p)
            self._written = {address_of(p): (at, p) for at, p in enumerate(held)}
            self._written.pop(address_of(x), None)
            to.forget()
            # What is not along the gradient may be the way back of a displacement, which an optimizer's step follows.
            self._counted(0, 1.0 if of_gradient else 0.5)
            return True
        at, p = self._written.pop(address_of(x), (-1, None))
        if self._step is None or p is None:
            return False
        # Programs sum the gradient of each parameter just before they write to it.
        with to.unseen():
            names = {id(p): self._step.params[at].name}
            self._step.params[at] = replace(
                parameters_of([p], names, to.id_of, self._asked, to.change_of)[0], id=self._step.params[at].id
            )
        events = self._tape.events
        begin = next(at for at in range(len(events) - 1, -1, -1) if events[at] is self._step)
        of_step = [
            isinstance(e, (Step, Scaled)) or (isinstance(e, Sent) and not e.followed) for e in events[begin:]
        ]
        own, others = (
            list(itertools.compress(events[begin:], which)) for which in (of_step, [not x for x in of_step])
        )
        events[begin:] = [*own[1:], self._step, *others]
        return True

    def renews(self, x: Tensor, old: Tensor, site: int) -> None:
        """The program has made new parameters, of which it uses the first now: a step of its own of all of them."""
        to, held = self._to, self._to.leaves()
        gradient = to.made.get(id(old))
        self._take(held, manual=True)
        if self._step is None:
            return
        with to.unseen(), torch.no_grad():
            self._step.site = site
            self._step.by_gradients = gradient is not None and is_multiple(x - old, gradient)
        self._settle_renewed()
        self._renewed = self._step, [weakref.ref(p) for p in held]
        to.forget()
        self._counted(0)

    def writes_left_over(self, x: Tensor) -> None:
        """The program writes to a parameter that an optimizer's step has left, as its gradients tell it."""
        p, number = self._to.left_over.pop(address_of(x))
        step = self._tape.events[-1] if self._tape.events else None
        if not (isinstance(step, Step) and step.left_over):
            step = Step([], {}, self._to.site(), manual=True, left_over=True)
            self._tape.events.append(step)
        with self._to.unseen():
            names = self._to.modules.names()
            step.params += parameters_of([p], names, lambda _: number, self._asked, self._to.change_of)

    def _settle_renewed(self) -> None:
        """Parameters that outlive new ones which the program has made are a model's, and the new ones a trial."""
        step, held = self._renewed or (None, [])
        for param in step.params if step is not None and all(p() is not None for p in held) else ():
            param.copied = True

    def _take(self, held: list[Any], *, manual: bool) -> None:
        to = self._to
        to.settle()
        names = to.modules.names()
        for p in held if to.handles.pending else ():
            gradient = gradient_of(p)
            to.handles.used([] if gradient is None else [gradient], names.get(id(p), "a parameter"))
        with to.unseen():
            params: list[Param] = parameters_of(held, names, to.id_of, self._returned, to.change_of)
            buffers, frozen = to.modules.buffers(), to.modules.frozen()
            written = {
                name: to.written_at[address_of(x)]
                for name, x in (*buffers.items(), *frozen.items())
                if address_of(x) in to.written_at
            }
            to.written_at.clear()
            taken = {
                name: [number for number, of in to.taken.items() if id(x) in of]
                for name, x in (*buffers.items(), *frozen.items())
            }
            copies = ({name: x.detach().clone() for name, x in each.items()} for each in (buffers, frozen))
            buffers, frozen = copies
        self._step = Step(
            params, buffers, to.site(), manual, to.modules.averaging(), written=written, frozen=frozen
        )
        self._step.taken, self._step.modes = taken, to.modules.modes()
        self._step.transformed, self._transformed = (-1 if to.roots else self._transformed), -1
        self._tape.events.append(self._step)
        self._asked, self._returned, self._written, self._edges = self._returned, {}, {}, {}

    def _counted(self, optimizer: int, steps: float = 1.0) -> None:
        self._counts[optimizer] = self._counts.get(optimizer, 0.0) + steps
        self._tape.steps = math.ceil(max(self._counts.values()))
        if optimizer:  # a step of the program's own may be at its first parameter
            self._ends()

    def _ends(self) -> None:
        """End the program if it has taken its steps."""
        if not self._counts:
            return
        self._settle_renewed()
        if min(self._counts.values()) >= self._left or self._tape.steps > self._left:
            self._to.quiet = True
            self._enough()


def _copied(gradient: Tensor | None) -> Tensor | None:
    """A copy of a plain tensor; the parts of others are seen elsewhere."""
    return gradient.detach().clone() if type(gradient) is Tensor else None


def run_rank(
    rank: int, size: int, port: int, target: Any, folder: str, steps: int, record: bool = True
) -> None:
    """Run a script as one rank, in a process that is made for it and ends with it.

    The tape and what the script prints go to the folder. It ends after so many steps of an optimizer; without `record`
    it only runs, as long.
    """
    path = Path(folder) / f"{rank}.out"
    stream = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(stream, standard)
    faulthandler.enable(all_threads=False)  # says where, if a signal kills the rank
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        TORCHELASTIC_RUN_ID="gradmesh-check",
    )
    torch.set_num_threads(1)
    seed_anew()
    tape, modules = Tape(rank, size), Modules()
    recorder = Recorder(tape, modules, Path(folder) / f"{rank}.calls")
    start = time.perf_counter()

    def enough() -> None:
        tape.ended, tape.seconds = "stopped", time.perf_counter() - start
        _leave(tape, recorder, Path(folder))

    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_on_this_machine(recorder))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(modules)
            stack.enter_context(watched(recorder, steps, enough, lambda: None if record else enough()))
            if record:
                stack.enter_context(recorder)
                stack.enter_context(installed(Verbs(recorder)))
            _run(target)
    except SystemExit as error:
        if error.code not in (None, 0):
            _failed(tape, recorder, error, Path(folder))
    except BaseException as error:
        _failed(tape, recorder, error, Path(folder))
    if tape.ended != "stopped":
        tape.seconds = time.perf_counter() - start
        _leave(tape, recorder, Path(folder))
    sys.stdout.flush()
    sys.stderr.flush()
    if tape.ended != "raised":
        _stay(Path(folder), size)
    os._exit(0)  # groups whose other ranks are over may not end by themselves


def _stay(folder: Path, size: int) -> None:
    """Keep the store and the connections of a rank that is over until the others are, or make no calls."""
    last, seen = time.monotonic(), -1
    while time.monotonic() - last < _STAYS and not all((folder / f"{r}.tape").exists() for r in range(size)):
        time.sleep(0.02)
        if (made := sum(path.stat().st_size for path in folder.glob("*.calls"))) != seen:
            last, seen = time.monotonic(), made


class _Pickler(pickle.Pickler):
    """Where `__main__` imports torch, pickle takes a memory format for an attribute of `__main__`."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.memory_format):
            return _of_torch, (str(value).removeprefix("torch."),)
        return NotImplemented


def _of_torch(name: str) -> Any:
    return getattr(torch, name)


def _leave(tape: Tape, recorder: Recorder, folder: Path) -> None:
    """Write the tape, whole or not at all."""
    recorder.settle()
    with recorder.unseen():
        forget_overwritten(tape)
    tape.labels = recorder.modules.labels
    tape.memory = most_memory()
    partial = folder / f"{tape.rank}.partial"
    with partial.open("wb") as file:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(tape)
    partial.rename(folder / f"{tape.rank}.tape")


def _run(target: Any) -> None:
    sys.argv = [target.path_or_module, *target.args]
    if target.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target.path_or_module, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(target.path_or_module)))
        runpy.run_path(target.path_or_module, run_name="__main__")


def _failed(tape: Tape, recorder: Recorder, error: BaseException, folder: Path) -> None:
    traceback.print_exc()
    (folder / f"{tape.rank}.failed").touch()
    if tape.ended == "stopped":
        return  # all that was asked for is known
    tape.ended, tape.error = "raised", traceback.format_exception_only(error)[0].strip()
    tape.raised_at = recorder.number_of(user_frame(error.__traceback__))
    tape.not_used = _not_used(tape.error)


_STAYS = 1.0
"""Seconds without a call of another rank after which a rank that is over ends."""

_UNUSED = re.compile(r"indices which did not receive grad for rank \d+: ([\d ]+)")
"""How DDP says which parameters it waits for; names only with a setting of torch's."""


def _not_used(error: str) -> tuple[str, ...]:
    """The names of the parameters that DDP's error is about."""
    found = _UNUSED.search(error)
    if found is None:
        return ()
    wrappers = instances_of(DistributedDataParallel)
    if len(wrappers) != 1:
        return ()
    ignored = wrappers[0].parameters_to_ignore
    named = [
        name for name, p in wrappers[0].module.named_parameters() if p.requires_grad and name not in ignored
    ]
    return tuple(named[i] for i in map(int, found[1].split()) if i < len(named))


def _on_this_machine(recorder: Recorder) -> AbstractContextManager[None]:
    """Gloo where a script asks for NCCL and there is no GPU."""
    original = dist.init_process_group

    def init(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        recorder.handles.in_order = backend != "gloo"
        if not torch.cuda.is_available() and (backend is None or "nccl" in str(backend)):
            backend = "gloo"
            kwargs.pop("device_id", None)
        return original(backend, *args, **kwargs)

    return replaced((dist, "init_process_group", init))
