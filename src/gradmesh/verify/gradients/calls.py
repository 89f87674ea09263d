"""Records the collectives of a run with their call sites, and the graph nodes of autograd Functions.

It uses the interpreter's profile function, which receives each call of torch.distributed, of gradmesh's verbs and of
`Function.apply` on its thread, however the names were imported and whatever the backend is.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh import errors
from gradmesh._torch import in_backward
from gradmesh._util.call_sites import Site, call_site, show_site
from gradmesh.verbs import collectives

__all__ = ["Called", "Change", "Node", "Recorder", "is_raw"]

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


_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(str(file))) + os.sep for file in (torch.__file__, errors.__file__)
)
_CODES = _codes()
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
"""The code of `Function.apply`; None if it is in C++, as from torch 2.15 on."""


def is_raw(code: CodeType) -> bool:
    """Whether this is the code of a torch.distributed collective that moves tensors."""
    return _CODES.get(code, "").startswith("torch.distributed.")


@dataclass(eq=False)
class Called:
    """One call of a collective.

    Attributes:
        op: the collective's name.
        site: the call site.
        inside: the number of the Function in whose forward or backward it ran; None: outside of Functions.
        backward: whether it ran in a backward pass.
        handed_grad: whether a tensor argument requires grad.
        tensors: its tensor arguments by parameter name, if it ran outside of Functions.
    """

    op: str
    site: Site
    inside: int | None
    backward: bool
    handed_grad: bool
    tensors: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Node:
    """One application of an autograd Function, with its graph node.

    Attributes:
        number: its index in the run.
        name: the Function's name.
        site: the line that applies it.
        node: the graph node.
        ours: whether the Function belongs to gradmesh.
        collective: whether it may be at fault: collectives ran in its forward or backward, or it is user code.
    """

    number: int
    name: str
    site: Site
    node: Any
    ours: bool
    collective: bool = False

    @property
    def text(self) -> str:
        """Its name and call site; identical on every rank."""
        return f"{self.name} {show_site(self.site)}"


class Change:
    """A modification of a run, to see its effect on the gradients."""

    def node(self, node: Node) -> None:
        """Called after a Function was applied and added to the graph."""

    def returned(self, called: Called) -> None:
        """Called after a torch.distributed collective outside of Functions has returned."""


class Recorder:
    """Records collectives and Functions on this thread while inside `recording()`.

    Args:
        change: a modification to apply to the run.
    """

    def __init__(self, change: Change | None = None) -> None:
        self._change = change
        self.called: list[Called] = []
        self.nodes: list[Node] = []
        self.ran: list[int] = []
        self._open: list[tuple[FrameType, str]] = []
        self._applying: list[object] = []
        self._contexts: list[Any] = []
        self._pending: dict[int, list[Called]] = {}
        self._in_node: int | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record, in place of any other profile function."""
        before = sys.getprofile()
        sys.setprofile(self._event)
        try:
            yield self
        finally:
            sys.setprofile(before)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return"):
            if _APPLY is None and _applies(arg):
                self._apply_in_c(event, arg.__self__)
            return
        if event == "call" and self._contexts and self._contexts[-1] is None:
            self._contexts[-1] = next((x for x in frame.f_locals.values() if isinstance(x, _CONTEXT)), None)
        code = frame.f_code
        if code is _APPLY:
            self._apply(frame, event, arg)
            return
        op = _CODES.get(code)
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
            self._pending.setdefault(id(self._applying[-1]), []).append(called)
        self.called.append(called)
        if backward and inside is not None:
            self.nodes[inside].collective = True

    def _apply_in_c(self, event: str, cls: type) -> None:
        """As `_apply`, for C++, which does not expose the result: the node is the `ctx` of the Function's methods."""
        if event == "c_call":
            self._applying.append(object())
            self._contexts.append(None)
            return
        if not self._applying:
            return
        inner = self._pending.pop(id(self._applying.pop()), [])
        node = self._contexts.pop()
        in_graph = node is not None and any(to is not None for to, _ in node.next_functions)
        if in_graph and not in_backward() and (inner or not self._applying):
            self._node(node, cls, inner)

    def _apply(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self._applying.append(frame)
            return
        if not self._applying or self._applying[-1] is not frame:
            return
        self._applying.pop()
        inner = self._pending.pop(id(frame), [])
        nodes = {x.grad_fn for x in _tensors(arg) if x.grad_fn is not None}
        cls = frame.f_locals.get("cls")
        if len(nodes) != 1 or in_backward() or cls is None:
            return
        if self._applying and not inner:  # inside another Function's forward, where nothing is recorded
            return
        self._node(nodes.pop(), cls, inner)

    def _node(self, node: Any, cls: type, inner: list[Called]) -> None:
        number = len(self.nodes)
        ours = cls.__module__.startswith("gradmesh.")
        name = cls.__name__
        op = getattr(node, "op", None)
        if ours and op is not None:
            name = f"gradmesh.{op.called}"
        own = not cls.__module__.startswith("torch.")
        made = Node(number, name, call_site(), node, ours, bool(inner) or own)
        self.nodes.append(made)
        for called in inner:
            called.inside = number
        node.register_prehook(lambda grads: self._entered(number, grads))
        if self._change is not None:
            self._change.node(made)
        node.register_hook(lambda *_: self._left())

    def _entered(self, number: int, _: object) -> None:
        self._in_node = number
        self.ran.append(number)

    def _left(self) -> None:
        self._in_node = None


def _applies(function: Any) -> bool:
    """Whether a builtin is the `apply` of an autograd Function."""
    cls = getattr(function, "__self__", None)
    named = getattr(function, "__name__", "") == "apply"
    return named and isinstance(cls, type) and issubclass(cls, torch.autograd.Function)


_CONTEXT = torch.autograd.function.BackwardCFunction


def _origin(frame: FrameType, handed: dict[str, Any]) -> Tensor | None:
    """The tensor with requires_grad that shares a detached operand's memory, if the caller still has it."""
    source = handed.get("tensor", handed.get("input_tensor"))
    if not isinstance(source, Tensor) or source.requires_grad:
        return source if isinstance(source, Tensor) else None
    caller = frame.f_back
    while caller is not None and not is_outside(caller.f_code):
        caller = caller.f_back
    for x in [] if caller is None else caller.f_locals.values():
        if not isinstance(x, Tensor) or not x.requires_grad or x.shape != source.shape:
            continue
        if x.data_ptr() == source.data_ptr():
            return x
    return source


def is_outside(code: CodeType) -> bool:
    """Whether code is neither torch's nor gradmesh's."""
    return not code.co_filename.startswith(_LIBRARIES)


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, list | tuple):
        return [each for each in x if isinstance(each, Tensor)]
    return []
