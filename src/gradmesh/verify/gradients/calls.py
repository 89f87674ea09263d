"""The collectives of a run, and runs with the gradient of one of them modified.

`CallRecorder` uses the interpreter's profile function, which receives each call of torch.distributed, of gradmesh's
verbs and of `Function.apply` on its thread, however the names were imported and whatever the backend is. It records
call sites and the graph nodes of autograd Functions. `At` modifies the gradient that a graph node returns, on
every rank; or, for a torch.distributed collective outside of Functions, the gradient of the tensor that it wrote.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gradmesh._torch import in_backward
from gradmesh._util.call_sites import GRADMESH, TORCH, Site, call_site, show_site
from gradmesh.verbs import collectives
from gradmesh.verify.gradients.program import Options, Program, exchanged, prepared

_RAW = (
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "gather",
    "batch_isend_irecv", "irecv", "isend", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "send",
)  # fmt: skip
_NO_TENSORS = (
    "all_gather_object", "broadcast_object_list", "gather_object", "monitored_barrier", "recv_object_list",
    "scatter_object_list", "send_object_list",
)  # fmt: skip
"""Functions that move no tensors of the program, although they call collectives."""


def _codes() -> dict[CodeType, str]:
    found = {}
    for name in _NO_TENSORS:
        found[inspect.unwrap(getattr(dist, name)).__code__] = ""
    for name in _RAW:
        function = inspect.unwrap(getattr(dist, name))
        found[function.__code__] = f"torch.distributed.{name}"
    for name in collectives.__all__:
        function = inspect.unwrap(getattr(collectives, name))
        if inspect.isfunction(function):
            found[function.__code__] = f"gradmesh.{name}"
    return found


_CODES = _codes()


def is_raw(code: CodeType) -> bool:
    """Whether this is the code of a torch.distributed collective that moves tensors."""
    return _CODES.get(code, "").startswith("torch.distributed.")


@dataclass(eq=False)
class Called:
    """One call of a collective."""

    op: str  # the collective's name
    site: Site  # the call site
    # the number of the Function in whose forward or backward it ran; None: outside of Functions
    inside: int | None
    backward: bool  # whether it ran in a backward pass
    handed_grad: bool  # whether a tensor argument requires grad
    # its tensor arguments by parameter name, if it ran outside of Functions
    tensors: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Its name and call site; identical on every rank."""
        return f"{self.op} {show_site(self.site)}"


@dataclass(eq=False)
class Node:
    """One application of an autograd Function, with its graph node."""

    number: int  # its index in the run
    name: str  # the Function's name
    site: Site  # the line that applies it
    node: Any  # the graph node
    ours: bool  # whether the Function belongs to gradmesh
    # whether it may be at fault: collectives ran in its forward or backward, or it is user code
    collective: bool = False

    @property
    def text(self) -> str:
        """Its name and call site; identical on every rank."""
        return f"{self.name} {show_site(self.site)}"


class CallRecorder:
    """Records collectives and Functions on this thread while inside `recording()`."""

    def __init__(self, change: At | None = None) -> None:
        self._change = change
        self.called: list[Called] = []
        self.nodes: list[Node] = []
        self.ran: list[int] = []
        self._open: list[tuple[FrameType, str]] = []
        self._applying: list[list[Called]] = []  # the calls in the forward of each Function being applied
        self._contexts: list[Any] = []
        self._in_node: int | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[CallRecorder]:
        """Record, in place of any other profile function."""
        before = sys.getprofile()
        sys.setprofile(self._event)
        try:
            yield self
        finally:
            sys.setprofile(before)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return"):
            if _applies(arg):
                self._apply(event, arg.__self__)
            return
        if event == "call" and self._contexts and self._contexts[-1] is None:
            self._contexts[-1] = next(
                (x for x in frame.f_locals.values() if isinstance(x, BackwardCFunction)), None
            )
        op = _CODES.get(frame.f_code)
        if op is None:
            return
        if event == "return":
            if self._open and self._open[-1][0] is frame:
                self._open.pop()
                if op:
                    self._returned()
            return
        self._open.append((frame, op))
        if len(self._open) == 1:
            self._call(op, frame)

    @property
    def raw(self) -> list[Called]:
        """The forward calls of torch.distributed outside of Functions."""
        return [
            called
            for called in self.called
            if called.inside is None and not called.backward and called.op.startswith("torch.")
        ]

    def _returned(self) -> None:
        if self._open or self._change is None or not self.called or self.called[-1] not in self.raw:
            return
        sys.setprofile(None)
        try:
            self._change.returned(self.called[-1])
        finally:
            sys.setprofile(self._event)

    def _call(self, op: str, frame: FrameType) -> None:
        if not op:
            return
        backward = in_backward()
        handed = {name: x for name, x in frame.f_locals.items() if _tensors(x)}
        with_grad = any(x.requires_grad for value in handed.values() for x in _tensors(value))
        inside = self._in_node if backward else None
        called = Called(op, call_site(), inside, backward, with_grad and not self._applying)
        if not self._applying and not backward:
            called.tensors = {**handed, "origin": _origin(frame, handed)}
        if self._applying and not backward:
            self._applying[-1].append(called)
        self.called.append(called)
        if backward and inside is not None:
            self.nodes[inside].collective = True

    def _apply(self, event: str, cls: type) -> None:
        """A Function is applied in C++, which does not expose the result: the node is the `ctx` of its methods."""
        if event == "c_call":
            self._applying.append([])
            self._contexts.append(None)
            return
        if not self._applying:
            return
        inner, node = self._applying.pop(), self._contexts.pop()
        in_graph = node is not None and any(to is not None for to, _ in node.next_functions)
        # Inside another Function's forward nothing is recorded.
        if in_graph and not in_backward() and (inner or not self._applying):
            number = len(self.nodes)
            ours, op = cls.__module__.startswith("gradmesh."), getattr(node, "op", None)
            name = f"gradmesh.{op.called}" if ours and op is not None else cls.__name__
            own = not cls.__module__.startswith("torch.")
            made = Node(number, name, call_site(), node, ours, bool(inner) or own)
            self.nodes.append(made)
            for called in inner:
                called.inside = number
            node.register_prehook(lambda _: self._entered(number))
            if self._change is not None:
                self._change.node(made)
            node.register_hook(lambda *_: self._left())

    def _entered(self, number: int) -> None:
        self._in_node = number
        self.ran.append(number)

    def _left(self) -> None:
        self._in_node = None


def _applies(function: Any) -> bool:
    """Whether a builtin is the `apply` of an autograd Function."""
    cls = getattr(function, "__self__", None)
    named = getattr(function, "__name__", "") == "apply"
    return named and isinstance(cls, type) and issubclass(cls, torch.autograd.Function)


def _origin(frame: FrameType, handed: dict[str, Any]) -> Tensor | None:
    """The tensor with requires_grad that shares a detached operand's memory, if the caller still has it."""
    source = handed.get("tensor", handed.get("input_tensor"))
    if not isinstance(source, Tensor) or source.requires_grad:
        return source if isinstance(source, Tensor) else None
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename.startswith((TORCH, GRADMESH)):
        caller = caller.f_back
    for x in [] if caller is None else caller.f_locals.values():
        if not isinstance(x, Tensor) or not x.requires_grad or x.shape != source.shape:
            continue
        if x.data_ptr() == source.data_ptr():
            return x
    return source


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, list | tuple):
        return [each for each in x if isinstance(each, Tensor)]
    return []


DOUBLE = "doubled"
SUM = "summed over the ranks"
NEXT = "replaced by that of rank r + {by}"
PART = "replaced by the local slice of the sum over ranks of its incoming gradient"
CONJ = "conjugated"
GATHERED = "reduce-scattered to the ranks that it was gathered from"


@dataclass(frozen=True)
class Place:
    """A collective of the program: its name and call site, and its index among equal ones."""

    text: str
    occurrence: int


@dataclass(frozen=True)
class Local:
    """The gradient that a gather returned on this rank, and its replacement."""

    got: Tensor  # the returned gradient
    want: Tensor  # the local slice of the sum over ranks of the incoming gradients
    terms: Tensor  # the local slice of each rank's incoming gradient


def _next_place(seen: Counter[str], text: str) -> Place:
    """The next place with that text."""
    seen[text] += 1
    return Place(text, seen[text])


class At:
    """A modification at one place of a run, to see its effect on the gradients."""

    def __init__(self, place: Place, how: str, only: int | None) -> None:
        self.place, self.how, self.only = place, how, only
        self._nodes, self._raw = Counter[str](), Counter[str]()
        self.local: Local | None = None
        self._gathered: tuple[list[Tensor], Tensor] | None = None

    def node(self, node: Node) -> None:
        """Hook the node if it is at the place, after its Function was added to the graph."""
        if _next_place(self._nodes, node.text) == self.place and self.only in (None, dist.get_rank()):
            node.node.register_hook(self._changed)

    def returned(self, called: Called) -> None:
        """Hook the output of a torch.distributed collective outside of Functions if it is at the place."""
        if _next_place(self._raw, called.text) != self.place:
            return
        handed = called.tensors
        if self.how == SUM and isinstance(x := handed.get("tensor"), Tensor):
            if x.requires_grad:
                x.register_hook(_summed)
            return
        source = handed.get("origin")
        outputs = handed.get("tensor_list", handed.get("output_tensor"))
        if isinstance(source, Tensor) and outputs is not None:
            listed = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            for x in listed:
                if not x.requires_grad and (x.is_floating_point() or x.is_complex()):
                    x.requires_grad_()
            self._gathered = listed, source

    def after(self) -> None:
        """Reduce-scatter the gradients of gathered tensors to their source ranks."""
        if self._gathered is None:
            return
        outputs, source = self._gathered
        arrived = [torch.zeros_like(x) if x.grad is None else x.grad for x in outputs]
        parts = arrived if len(arrived) > 1 else list(arrived[0].chunk(dist.get_world_size()))
        sent = [_summed(part) for part in parts]
        if source.requires_grad:
            source.backward(sent[dist.get_rank()].reshape(source.shape))

    def _changed(self, given_back: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> Any:
        if self.how == PART:
            mine = next((g for g in given_back if g is not None), None)
            terms = _parts(mine, [g for g in given if g is not None])
            if mine is None or terms is None:
                return None
            self.local = Local(mine.detach().clone(), terms.sum(0), terms)
            return tuple(self.local.want.clone() if g is mine else g for g in given_back)
        if self.how not in (DOUBLE, CONJ) and not _alike(given_back):
            return None
        if self.how not in (DOUBLE, CONJ, SUM):
            by = int("".join(c for c in self.how if c.isdigit()))
            everyones = exchanged([None if g is None else g.detach() for g in given_back])
            theirs = everyones[(dist.get_rank() + by) % len(everyones)]
            return tuple(theirs)
        how = {DOUBLE: lambda g: 2 * g, CONJ: lambda g: g.conj().resolve_conj(), SUM: _summed}[self.how]
        return tuple(None if g is None else how(g) for g in given_back)


def _summed(grad: Tensor) -> Tensor:
    total = grad.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def _alike(grads: tuple[Tensor | None, ...]) -> bool:
    """Whether the gradients have the same shapes on every rank, so that they can be summed."""
    shapes = exchanged([None if g is None else tuple(g.shape) for g in grads])
    return all(shape == shapes[0] for shape in shapes)


def _parts(mine: Tensor | None, given: list[Tensor]) -> Tensor | None:
    """The local slice of each rank's incoming gradient, stacked; None if the op is not a gather.

    The incoming gradients are one full tensor, or one tensor per rank.
    """
    received = exchanged((None if mine is None else tuple(mine.shape), [g.detach() for g in given]))
    shapes = [shape for shape, _ in received]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if mine is None or any(shape is None or not wholes for shape, wholes in received):
        return None
    if len(given) == ranks > 1:
        return (
            torch.stack([wholes[rank] for _, wholes in received]) if given[rank].shape == mine.shape else None
        )
    wholes = [wholes[0] for _, wholes in received]
    if len({whole.shape for whole in wholes}) > 1:
        return None
    if wholes[0].shape == (ranks, *mine.shape):
        return torch.stack([whole[rank] for whole in wholes])
    for dim in range(mine.dim()):
        if _joins(shapes, wholes[0].shape, dim):
            sizes = [shape[dim] for shape in shapes]
            return torch.stack([whole.narrow(dim, sum(sizes[:rank]), sizes[rank]) for whole in wholes])
    return None


def _joins(parts: list[tuple[int, ...]], whole: torch.Size, dim: int) -> bool:
    """Whether concatenating the ranks' shards along a dimension gives the full shape."""
    first = parts[0]
    if len(first) != len(whole) or any(len(part) != len(first) for part in parts):
        return False
    return (*first[:dim], sum(part[dim] for part in parts), *first[dim + 1 :]) == tuple(whole)


_MOST = 24
"""The maximum number of collectives to try, since each change needs a run of the program."""


@dataclass(frozen=True)
class Found:
    """A collective in a recorded run."""

    place: Place
    ours: bool  # whether it is a gradmesh verb
    raw: bool  # whether it is a torch.distributed collective outside of Functions
    handed_grad: bool  # whether an argument of a raw collective requires grad
    inside: tuple[str, ...]  # the collectives in its forward and backward, with their call sites
    back: bool  # whether a collective ran in its backward


@dataclass
class Tried:
    """A change at a place, this rank's gradients with it, and the gradient that it replaced, if known."""

    place: Place
    how: str
    gradients: dict[str, Tensor | None]
    local: Local | None
    only: int | None = None
    """The only rank that changes it; None: all ranks."""


@dataclass
class Trials:
    """The collectives and trials of a rank."""

    found: list[Found] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)


def investigate(
    fn: Callable[..., Tensor], inputs: Callable[[int], object], options: Options, one_by_one: bool = False
) -> Trials:
    """Record a run, and run again with each collective's gradient changed, on all ranks or on one at a time."""
    program, _, _ = prepared(fn, inputs, options)
    result = Trials()
    try:
        recorder, _ = _run(program, None)
        result.found, ran = _seen(recorder)
        everyones = exchanged((result.found, ran))
        same_order = all(each[1] == ran for each in everyones)
        places = {found.place: found for ranks, _ in everyones for found in ranks}
        ways: list[tuple[str, int | None]]
        complex_leaf = any(leaf.base.is_complex() for leaf in program.inputs.leaves.values())
        for place, found in list(places.items())[:_MOST]:
            if one_by_one:
                ways = [] if found.raw else [(DOUBLE, only) for only in range(dist.get_world_size())]
            else:
                everywhere = all(any(f.place == place and f.raw for f in ranks) for ranks, _ in everyones)
                tried = _ways(found, same_order and place in ran, complex_leaf, everywhere)
                ways = [(how, None) for how in tried]
            for how, only in ways:
                change = At(place, how, only)
                _, gradients = _run(program, change)
                result.tried.append(Tried(place, how, gradients, change.local, only))
    finally:
        program.inputs.restore()
    return result


def _ways(found: Found, alike: bool, complex_leaf: bool, everywhere: bool) -> list[str]:
    """The changes to try; those that communicate only if every rank runs its nodes in the same order."""
    if found.raw:
        if not everywhere:
            return []
        return {"all_reduce": [SUM], "all_gather": [GATHERED], "all_gather_into_tensor": [GATHERED]}.get(
            found.place.text.split()[0].rpartition(".")[2], []
        )
    conjugate = [CONJ] if complex_leaf else []
    further = [NEXT.format(by=by) for by in range(1, dist.get_world_size())]
    return [DOUBLE, *conjugate, *([PART, SUM, *further] if alike else [])]


def _seen(recorder: CallRecorder) -> tuple[list[Found], list[Place]]:
    seen, raw, result, by_number = Counter[str](), Counter[str](), [], {}
    for node in recorder.nodes:
        place = by_number[node.number] = _next_place(seen, node.text)
        if not node.collective:
            continue
        inner = [called for called in recorder.called if called.inside == node.number]
        lines = dict.fromkeys(
            f"{called.op}{' in backward' if called.backward else ''} {show_site(called.site)}"
            for called in inner
        )
        back = any(called.backward for called in inner)
        result.append(Found(place, node.ours, False, False, () if node.ours else tuple(lines), back))
    for called in recorder.raw:
        result.append(Found(_next_place(raw, called.text), False, True, called.handed_grad, (), False))
    return result, [by_number[number] for number in recorder.ran]


def _run(program: Program, change: At | None) -> tuple[CallRecorder, dict[str, Tensor | None]]:
    recorder = CallRecorder(change)
    with recorder.recording():
        gradients = program.gradients(keep=None if change is None else change.after)
    return recorder, gradients
