"""The code under audit, on one rank: what `build` returned and how it is called, its writes, and the settings it reads.

A switch is a module global, an attribute or a dict key that the code reads and that other code can change.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import os
import sys
import threading
import tokenize
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gradmesh._util.call_sites import GRADMESH, PARSING, TORCH
from gradmesh._util.structure import sequence_like, tensors_in
from gradmesh.autograd import scaling
from gradmesh.autograd.ordered import Order, ordered
from gradmesh.autograd.traced import subclasses
from gradmesh.errors import AbortedError, ArgumentError, DeadlockError, MismatchError, OrderError
from gradmesh.verify.gradients.inputs import local_shard

IN_BACKWARD = "raised in backward"
"""A note that is added to exceptions raised in backward."""
_REENTRANT = "CheckpointFunctionBackward"
_WAITED = (DeadlockError, AbortedError, MismatchError)

_LIBRARIES = (TORCH, GRADMESH, os.path.dirname(os.path.abspath(threading.__file__)) + os.sep, "<frozen")
"""Folders of library code, which is not under audit: torch, gradmesh, the standard library."""

_of_this_rank = threading.local()
"""`.subject`: a rank is a thread or the main thread of a process, which persists between probes."""


@dataclass
class Subject:
    """A function under audit, on one rank."""

    fn: Callable[..., Any]  # the function
    arguments: tuple[Any, ...]  # its arguments, as `build` returned them
    inputs: tuple[Any, ...]  # the tensors in `arguments`
    operands: tuple[int, ...]  # the indices of the inputs to differentiate
    rank: int  # this rank's index among the participating ranks
    # returns a context manager that changes program state, to see whether the gradient changes with it
    change: Callable[[], contextlib.AbstractContextManager[object]] | None = None
    # the dtype of drawn operands; complex ones use the complex dtype of that width
    dtype: torch.dtype = torch.float64
    ordered: bool = False  # whether the function must be called inside `gradmesh.ordered()`
    kept: dict[str, Any] = field(default_factory=dict)  # values that one probe stores for the next

    def operand_dtype(self, index: int, complex_too: bool = False) -> torch.dtype:
        """The dtype in which to draw an operand."""
        wide = self.inputs[self.operands[index]].is_complex() or complex_too
        return self.dtype.to_complex() if wide else self.dtype

    def own(self) -> list[Tensor]:
        """The operands that `build` returned, in the dtype in which operands are drawn."""
        return [
            self.inputs[i].detach().to(self.operand_dtype(n)).clone() for n, i in enumerate(self.operands)
        ]

    def call(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Call the function and return its floating-point and complex results; local shards of DTensors."""
        values = list(self.inputs)
        for index, x in zip(self.operands, operands, strict=True):
            values[index] = x
        out = self.fn(*replaced(self.arguments, iter(values)))
        out = list(out) if isinstance(out, Iterator) else out
        local = [local_shard(y) for y in tensors_in(out)]
        return [y for y in local if y.is_floating_point() or y.is_complex()]

    @contextlib.contextmanager
    def differentiated(
        self, leaves: list[Tensor], given: list[Tensor] | None = None, in_order: bool = False
    ) -> Iterator[Graph]:
        """Call the function, on `given` or copies of the leaves, for a backward inside of the block."""
        with ordered() if self.ordered or in_order else contextlib.nullcontext() as order:
            leaves = [x.requires_grad_() for x in leaves]
            # not leaves, so that in-place writes are allowed
            given = [x.clone() for x in leaves] if given is None else given
            yield Graph(leaves, given, self.call(given), order)


@dataclass
class Graph:
    """A call of the function with its graph."""

    leaves: list[Tensor]  # the tensors to differentiate by
    given: list[Tensor]  # the operands of the call
    results: list[Tensor]
    order: Order | None  # the block of `gradmesh.ordered()` that it runs in, if any

    def backward(self, gradients: Sequence[Tensor], **options: bool) -> list[Tensor | None]:
        """The gradients of the leaves; None where there is none."""
        return self.grad(self.results, self.leaves, gradients, **options)

    def grad(
        self,
        results: Sequence[Tensor],
        operands: Sequence[Tensor],
        gradients: Sequence[Tensor],
        **options: bool,
    ) -> list[Tensor | None]:
        """As `torch.autograd.grad`; results that do not require grad are skipped."""
        pairs = [(y, g) for y, g in zip(results, gradients, strict=True) if y.requires_grad]
        ys, gs = [y for y, _ in pairs], [g for _, g in pairs]
        with noted_in_backward():
            if self.order is not None:
                return list(self.order.grad(ys or None, operands, gs or None, allow_unused=True, **options))
            if not pairs:
                return [None] * len(operands)
            # A reentrant checkpoint does not support torch.autograd.grad.
            if any(type(node).__name__ == _REENTRANT for node in nodes(ys)):
                for x in operands:
                    x.grad = None
                torch.autograd.backward(ys, gs, **options)  # type: ignore[arg-type]
                return [x.grad for x in operands]
            return list(torch.autograd.grad(ys, operands, gs, allow_unused=True, **options))


@contextlib.contextmanager
def noted_in_backward() -> Iterator[None]:
    """Add the note `IN_BACKWARD` to exceptions."""
    try:
        yield
    except Exception as error:
        error.add_note(IN_BACKWARD)
        raise


def dense(gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the gradients, zeros in place of None."""
    return [
        torch.zeros_like(x) if g is None else g.detach().clone()
        for g, x in zip(gradients, leaves, strict=True)
    ]


@dataclass(frozen=True)
class Described:
    """A rank's description of the function, from which the caller plans the probes."""

    name: str  # the function's name
    line: str | None  # "file:line" of its definition
    values: list[Tensor]  # the operands that `build` returned
    can_change: bool  # whether `build` returned a `change`
    has_parameters: bool = False  # whether it is a module with trainable parameters, which are not operands


@dataclass(frozen=True)
class Failure:
    """An exception on one rank."""

    stage: str  # "forward" or "backward"
    kind: str  # the name of the exception's class
    text: str  # its message
    line: str | None  # the innermost line outside of torch and gradmesh
    waited: bool  # whether it only reports that other ranks failed or did not make the call
    order: bool = False  # whether its message recommends `gradmesh.ordered()`

    @property
    def first(self) -> str:
        """The exception's name and the first line of its message."""
        return f"{self.kind}: {self.text.splitlines()[0]}" if self.text else self.kind


def set_subject(build: Callable[..., Any], options: dict[str, Any], rank: int) -> Described:
    """Call `build` on this rank and store the result."""
    made = build(**options)
    if not (isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0])):
        raise _unusable("build() must return a function and its inputs", repr(made)[:200])
    fn, given = made[0], made[1]
    arguments = tuple(given) if isinstance(given, tuple | list) else (given,)
    inputs = tuple(tensors_in(arguments))
    floating = [i for i, x in enumerate(inputs) if x.is_floating_point() or x.is_complex()]
    asked = [i for i in floating if inputs[i].requires_grad]
    if not floating:
        raise _unusable(
            "the inputs contain no differentiable tensor", f"inputs {[type(x).__name__ for x in arguments]}"
        )
    _of_this_rank.subject = subject = Subject(
        fn, arguments, inputs, tuple(asked or floating), rank, made[2] if len(made) == 3 else None
    )
    of = getattr(fn, "__self__", None)
    named = of if inspect.isclass(of) else fn
    name = getattr(named, "__qualname__", type(fn).__qualname__).rpartition("<locals>.")[2]
    values = [inputs[i].detach().clone() for i in subject.operands]
    return Described(name, line_of(fn), values, subject.change is not None, _learns(fn) or _learns(of))


def _learns(fn: Any) -> bool:
    return isinstance(fn, torch.nn.Module) and any(p.requires_grad for p in fn.parameters())


def current_subject() -> Subject:
    """The function of this rank."""
    subject: Subject = _of_this_rank.subject
    return subject


def of_error(error: BaseException) -> Failure:
    """Describe an exception that was caught on this rank."""
    stage = "backward" if IN_BACKWARD in getattr(error, "__notes__", ()) else "forward"
    order = isinstance(error, OrderError) or "gradmesh.ordered()" in str(error)
    places = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_library(frame.filename)
    ]
    text = str(error)
    waited = isinstance(error, _WAITED) or any(kind.__name__ in text for kind in _WAITED)
    return Failure(stage, type(error).__name__, text, places[-1] if places else None, waited, order)


def replaced(x: Any, others: Iterator[Tensor]) -> Any:
    """A copy of nested tuples, lists and dicts with other tensors; parts without tensors are kept as they are."""
    if isinstance(x, Tensor):
        return next(others)
    if not isinstance(x, tuple | list | dict) or not any(True for _ in tensors_in(x)):
        return x
    if isinstance(x, dict):
        return {key: replaced(value, others) for key, value in x.items()}
    return sequence_like(x, [replaced(value, others) for value in x])


def is_library(file: str) -> bool:
    """Whether a file of code is torch's, gradmesh's or the standard library's."""
    return file.startswith(_LIBRARIES) and not (file.startswith(_LIBRARIES[2]) and "-packages" in file)


def line_of(code: Any) -> str | None:
    """The "file:line" of a function, or of the forward of an object."""
    of = getattr(code, "__self__", None)
    by_class = getattr(of if inspect.isclass(of) else type(code), "forward", None)
    for candidate in (by_class, code, getattr(code, "func", None)):
        # The file may have been edited since it was imported, so that the line no longer parses.
        with contextlib.suppress(TypeError, OSError, SyntaxError, tokenize.TokenError), PARSING:
            plain = inspect.unwrap(candidate)  # type: ignore[arg-type]
            return f"{inspect.getsourcefile(plain)}:{inspect.getsourcelines(plain)[1]}"
    return None


def python_function(node: Any) -> Any:
    """The autograd Function written in Python that a node of the graph belongs to, or None."""
    if not isinstance(node, BackwardCFunction):
        return None
    name = type(node).__name__.removesuffix("Backward")
    found = [cls for cls in subclasses(torch.autograd.Function) if cls.__name__ == name]
    return found[-1] if found else None


def backward_line(node: Any) -> str | None:
    """The "file:line" of a node's backward, if it belongs to an autograd Function written in Python."""
    cls = python_function(node)
    return None if cls is None else line_of(cls.backward)


def nodes(results: Sequence[Tensor]) -> Iterator[Any]:
    """The nodes of the graphs of results, each once."""
    stack: list[Any] = [y.grad_fn for y in results]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack += [above for above, _ in node.next_functions]


def _unusable(problem: str, got: str) -> ArgumentError:
    return ArgumentError.of(
        problem,
        op="verify.audit",
        expected="(fn, inputs); inputs is a floating-point or complex tensor, or a tuple that contains one",
        got=got,
        remedy="return e.g. (MyFunction.apply, torch.ones(3)) or (fn, (torch.ones(3), group))",
    )


_MOST = 24
"""The maximum number of switches to try."""
_DEPTH = 5
"""The maximum depth of calls to follow."""

_changed: dict[tuple[int, str], tuple[Any, str, Any]] = {}
"""The switches that are changed in this process now: holder, name and original value."""


@dataclass(frozen=True, eq=False)
class Switch:
    """One switch."""

    holder: Any  # the module globals, object, class or dict that contains it
    name: str  # its name or key
    where: str  # its location, as text
    value: Any  # its current value
    other: Any  # an alternative value

    def __str__(self) -> str:
        return f"{self.where} = {self.other!r} instead of {self.value!r}"


def set_switch(switch: Switch, forth: bool) -> None:
    """Set a switch to its other value, or restore it. Thread ranks share switches and set them to the same value."""
    key = id(switch.holder), switch.name
    if forth:
        _changed.setdefault(key, (switch.holder, switch.name, switch.value))
    else:
        _changed.pop(key, None)
    _put(switch.holder, switch.name, switch.other if forth else switch.value)


def restore() -> None:
    """Restore every switch that is still changed in this process."""
    for holder, name, value in list(_changed.values()):
        _put(holder, name, value)
    _changed.clear()


def _put(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def switches(*things: Any) -> list[Switch]:
    """The switches that functions and classes read, including the code that they call.

    Code of torch, gradmesh and the standard library is not followed. A bool is a switch; a string or a number is one
    if some code assigns it and the code that reads it contains another constant of that type.
    """
    search = _Search()
    for thing in things:
        search.follow(thing, _DEPTH)
    return list(search.found.values())[:_MOST]


class _Search:
    """Follows code into the code that it calls, and collects the switches that it reads."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], Switch] = {}
        self._seen: set[int] = set()

    def follow(self, thing: Any, depth: int) -> None:
        """Search a callable or a class, and what it leads to in at most `depth` calls."""
        if id(thing) in self._seen or depth < 0:
            return
        self._seen.add(id(thing))
        if isinstance(thing, functools.partial):
            self.follow(thing.func, depth)
        elif isinstance(thing, staticmethod | classmethod):
            self.follow(thing.__func__, depth)
        elif inspect.ismethod(thing) or (inspect.isbuiltin(thing) and inspect.isclass(thing.__self__)):
            self.follow(thing.__self__, depth)
            self.follow(getattr(thing, "__func__", None), depth)
        elif isinstance(thing, FunctionType):
            self._function(inspect.unwrap(thing), depth)
        elif inspect.isclass(thing):
            if not _foreign(thing):
                for value in list(vars(thing).values()):
                    self.follow(value, depth)
        elif callable(thing) and not inspect.isbuiltin(thing):
            self.follow(type(thing), depth)

    def _function(self, fn: Any, depth: int) -> None:
        if not isinstance(fn, FunctionType) or is_library(fn.__code__.co_filename):
            return
        reader = _Reader.of(fn.__code__)
        module = fn.__globals__.get("__name__", "?")
        for name in reader.read_from(fn.__globals__):
            where = f"{module}.{name}"
            self._add(fn.__globals__, name, where, reader, _assigned(fn.__globals__, name))
            self._value(fn.__globals__[name], where, reader, depth)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if cell != CellType():  # an empty one
                self._value(cell.cell_contents, name, reader, depth)

    def _value(self, value: Any, where: str, reader: _Reader, depth: int) -> None:
        """Search a value that code refers to."""
        if isinstance(value, list | tuple):
            for item in value:
                self.follow(item, depth - 1)
        elif isinstance(value, dict):
            for key in [key for key in value if isinstance(key, str) and key in reader.constants]:
                self._add(value, key, f"{where}[{key!r}]", reader, True)
        elif isinstance(value, ModuleType):
            if not is_library(getattr(value, "__file__", None) or "<frozen"):
                space = vars(value)
                for name in reader.read_from(space):
                    self._add(space, name, f"{where}.{name}", reader, _assigned(space, name))
                    self.follow(space[name], depth - 1)
        elif isinstance(value, FunctionType):
            self.follow(value, depth - 1)
        elif isinstance(value, SimpleNamespace) or not _foreign(
            value if inspect.isclass(value) else type(value)
        ):
            for name in reader.read_from(getattr(value, "__dict__", {})):
                self._add(value, name, f"{where}.{name}", reader, True)
            self.follow(value, depth - 1)

    def _add(self, holder: Any, name: str, where: str, reader: _Reader, assigned: bool) -> None:
        """Add a name or key of a holder, if it is a switch."""
        value = holder[name] if isinstance(holder, dict) else vars(holder)[name]
        if isinstance(value, bool):
            others: list[Any] = [not value]
        elif assigned and isinstance(value, str | int | float):
            others = [c for c in reader.constants if type(c) is type(value) and c != value]
            others = [c for c in others if " " not in str(c)]  # no sentences
        else:
            return
        if others:
            self.found.setdefault((id(holder), name), Switch(holder, name, where, value, others[0]))


@dataclass(frozen=True)
class _Reader:
    """The names and constants in the code of a function, with the functions inside of it."""

    names: frozenset[str]
    constants: list[Any]

    @classmethod
    def of(cls, code: CodeType) -> _Reader:
        codes = list(_codes(code))
        names = frozenset(name for each in codes for name in each.co_names)
        # Since Python 3.14 small integers are in the instructions themselves.
        load = {*dis.hasconst, dis.opmap.get("LOAD_SMALL_INT")}
        read = [i for each in codes for i in dis.get_instructions(each)]
        return cls(names, [i.argval for i in read if i.opcode in load])

    def read_from(self, space: Mapping[str, Any]) -> list[str]:
        """The names of a module or object that the code may read."""
        return sorted(self.names & set(space))


def _assigned(space: Mapping[str, Any], name: str) -> bool:
    """Whether a function of a module assigns one of its names."""
    return any(
        name in code.co_names
        and any(i.opname == "STORE_GLOBAL" and i.argval == name for i in dis.get_instructions(code))
        for value in list(space.values())
        if isinstance(value, FunctionType) and value.__globals__ is space
        for code in _codes(value.__code__)
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _foreign(cls: Any) -> bool:
    """Whether a class is built in or belongs to a library."""
    name = getattr(cls, "__module__", "")
    file = getattr(sys.modules.get(name), "__file__", None)
    return name != "__main__" if file is None else is_library(file)


Note = tuple[str, str, str | None]
"""The kind, the text and the line."""


def changed(
    kind: str, text: str, now: Sequence[Tensor], before: Sequence[Tensor], lines: Sequence[str]
) -> list[Note]:
    """Notes on tensors whose values changed; with the line if there is only one Function."""
    line = lines[0] if len(lines) == 1 else None
    return [
        (kind, text.format(index), line)
        for index, (a, b) in enumerate(zip(now, before, strict=True))
        if not same_values(a, b)
    ]


def shared(given: Sequence[Tensor], results: Sequence[Tensor]) -> list[Note]:
    """Notes on results that share the operands' memory, unless they are views known to autograd."""
    notes: list[Note] = []
    for i, x in enumerate(given):
        for j, y in enumerate(results):
            if type(y) is not Tensor or not y.numel() or not x.numel():
                continue
            if y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
                continue
            lines = [line for line in map(backward_line, nodes([y])) if line is not None]
            if lines or not y.requires_grad:
                text = f"result {j} shares the memory of operand {i}"
                notes.append(("result-aliases-operand", text, lines[0] if lines else None))
    return notes


class Watch:
    """Compares the incoming gradients of the autograd Functions in a graph before and after their backward."""

    def __init__(self, results: Sequence[Tensor]) -> None:
        self.lines: list[str] = []  # "file:line" of the backward of each Function outside of gradmesh
        self.scaled = False  # whether gm.scale_gradient is in the graph
        self._handed: list[tuple[str, str, Tensor, Tensor]] = []
        for node in nodes(results):
            line = backward_line(node)
            if line is None:
                continue
            self.scaled |= line.startswith(scaling.__file__)
            if line not in self.lines and not line.startswith(GRADMESH):
                self.lines.append(line)
            node.register_prehook(self._before(type(node).__name__.removesuffix("Backward"), line))

    def _before(self, name: str, line: str) -> Callable[[Sequence[Tensor | None]], None]:
        def look(grads: Sequence[Tensor | None]) -> None:
            for grad in grads:
                if grad is not None:
                    local = local_shard(grad.detach())  # comparing DTensors would communicate
                    self._handed.append((name, line, local, local.clone()))

        return look

    def notes(self) -> list[Note]:
        """Notes on the gradients that were written into."""
        found = [
            ("gradient-overwritten", f"{name}.backward writes into its incoming gradient", line)
            for name, line, grad, copy in self._handed
            if not same_values(grad, copy)
        ]
        return list(dict.fromkeys(found))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether tensors are equal, with NaN equal to NaN."""
    return torch.equal(torch.nan_to_num(a.detach()), torch.nan_to_num(b))
