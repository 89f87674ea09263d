"""Collectives in compiled programs and on fake tensors, and their order in Inductor."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils import _pytree as pytree

from gradmesh._torch.names import RELIED_ON_LATER, Attribute, find, gone, refuse, required
from gradmesh._torch.threads import of_thread

F = TypeVar("F", bound=Callable[..., Any])

READS_NUMBERS = torch.__version__ >= "2.11"
"""Whether a compiled program can read the numbers of a tensor, by leaving the compiled part."""

_COMPILED = "compiled programs raise for {}"
_OPS = {
    name: required(f"torch.ops._c10d_functional.{name}", f"{name} in a compiled program")
    for name in (
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all_single",
        "broadcast",
        "reduce_scatter_tensor",
        "wait_tensor",
    )
}


compiling = torch.compiler.is_compiling
"""Whether the call is in a program that is being compiled."""


def functional(name: str, group: dist.ProcessGroup, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """A functional collective, which a compiler can trace, move and bucket; returns fresh memory."""
    done: torch.Tensor = _OPS["wait_tensor"](_OPS[name](x, *args, group.group_name))
    return done


_fake = required("torch._subclasses.FakeTensor", "a collective")


def is_fake(x: torch.Tensor) -> bool:
    """Whether a tensor has a shape but no values: a fake one, or one on the meta device."""
    return x.is_meta or (type(x) is not torch.Tensor and isinstance(x, _fake))


resolve_group: Callable[[str], dist.ProcessGroup] = required(
    "torch.distributed.distributed_c10d._resolve_process_group", "a collective in a compiled program"
)
"""The process group with a name, on the calling rank."""


def default_group() -> dist.ProcessGroup | None:
    """The process group of the world, as the same object under compilation.

    Dynamo of torch 2.11 treats `dist.group.WORLD` as a different object if its class is written in Python.
    """
    return c10d._world.default_pg if hasattr(c10d, "_world") else dist.group.WORLD


def keyword_fields_last(kind: type[Any]) -> None:
    """Move the keyword-only fields of a dataclass to the end.

    Dynamo of torch 2.11 assigns positional arguments to the first fields, including keyword-only ones of a base class,
    and then raises.
    """
    fields = kind.__dataclass_fields__
    kind.__dataclass_fields__ = dict(sorted(fields.items(), key=lambda item: bool(item[1].kw_only)))
    for derived in kind.__subclasses__():
        keyword_fields_last(derived)


RELIED_ON_LATER["function._dynamo_marked_constant"] = (
    "Dynamo may fail on a compiled program that calls gradmesh"
)


def constant_to_compilers(function: F) -> F:
    """Mark a function as constant: Dynamo calls it during compilation instead of tracing it.

    As `torch.compiler.assume_constant_result`, which imports Dynamo, and that takes longer than importing torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_compile_context = find(
    "torch._guards.CompileContext.try_get",
    without="while one thread rank compiles, gm.objective on the other ranks behaves as if compiled",
)


@constant_to_compilers
def only_others_compile() -> bool:
    """Whether no program is being compiled on the calling thread; `compiling` is true for all threads of a process."""
    return _compile_context is not None and hasattr(of_thread, "world") and _compile_context() is None


def enters_graphs(*functions: Callable[..., Any]) -> Callable[[], None]:
    """Put calls of functions into Dynamo's graphs without tracing them, so that autograd handles them.

    Returns:
        A function that a compiled program must call before it calls one of them; it registers them with Dynamo.
    """

    @constant_to_compilers
    def allow() -> None:
        for function in functions:
            torch.compiler.allow_in_graph(function)

    return allow


_EVAL_FRAME = "torch._C._dynamo.eval_frame"
_NAMES = [
    f"{_EVAL_FRAME}.{name}" for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction.SKIP")
]
_UNMARKED = (
    "Dynamo may fail on a compiled program in which torch calls gradmesh's backends (DDP, a graph break)"
)
_mark, _strategy, _skip = [find(path, without=_UNMARKED) for path in _NAMES]


def never_compiled(kind: type[Any]) -> None:
    """Exclude the methods of a class, and all code that they call, from Dynamo's frame evaluation.

    torch's C++ calls the methods of a Python process group, of its works and of autograd Functions, also inside of
    compiled functions, where Dynamo would compile their frames. As a recursive `torch.compiler.disable`, which imports
    Dynamo; Dynamo can still inline the functions.
    """
    if None in (_mark, _strategy, _skip):
        return
    for value in vars(kind).values():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            _mark(function.__code__, _strategy(_skip, _skip))


_EFFECTS = "torch._higher_order_ops.effects"
if importlib.util.find_spec("torch._library.effects"):
    _ORDERED, _REGISTER = (
        "torch._library.effects.EffectType.ORDERED",
        "torch.library.CustomOpDef.register_effect",
    )
else:  # torch 2.9
    _ORDERED, _REGISTER = f"{_EFFECTS}._EffectType.ORDERED", f"{_EFFECTS}._register_effectful_op"
_ordered = find(_ORDERED, without=_COMPILED.format("every verb"))
_register = find(_REGISTER, without=_COMPILED.format("every verb"))
_overload = Attribute("torch.library.CustomOpDef._opoverload", "a collective in a compiled program")


def ordered_effect(op: Any) -> Any:
    """Make compilers keep every call of a custom op, in order.

    Returns:
        The op; if torch does not support this, a function that raises.
    """
    if _ORDERED in gone or _REGISTER in gone:

        def refused(*_: Any) -> torch.Tensor:
            refuse("a collective in a compiled program", _ORDERED, _REGISTER)

        return refused
    _register(op if _REGISTER.startswith("torch.library") else _overload.of(op), _ordered)
    return op


COMPILER = "torch._dynamo"
RELIED_ON_LATER[COMPILER] = (
    "ranks of gradmesh check load the compiler one by one; gradmesh.typed compiles library code"
)


def compiler_loaded() -> bool:
    """Whether this process has imported the compiler."""
    return COMPILER in sys.modules


_LOWERING = "torch._inductor.lowering"
for _path in (
    f"{_LOWERING}.register_lowering",
    "torch._inductor.ir.FallbackKernel.create",
    "torch._inductor.ir.TensorBox.create",
    "torch._inductor.virtualized.V.graph",
):
    RELIED_ON_LATER[_path] = "compiling a collective with Inductor raises an error"
_kept: set[Any] = set()


def keep_order_in_inductor(op: Any) -> None:
    """Make Inductor, if it is imported, keep the order of calls of an op with an ordered effect.

    Up to torch 2.14 it stores that dependency under the name of the result but looks it up under the name of the call,
    so that it moves the calls. This stores it under the call's name too.
    """
    lowering: Any = sys.modules.get(_LOWERING)
    if op in _kept or lowering is None:
        return
    _kept.add(op)
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def lower(*args: Any, **kwargs: Any) -> Any:
        graph: Any = V.graph
        begin, before = len(graph.operations), graph.effectful_ops.get(_ordered)
        made = ir.FallbackKernel.create(op, *args, **kwargs)
        if before is not None and hasattr(graph, "additional_star_deps"):
            for call in graph.operations[begin:]:
                graph.additional_star_deps[call.get_operation_name()].add(before.get_name())
        return pytree.tree_map(lambda x: ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x, made)

    lowering.register_lowering(op, type_promotion_kind=None)(lower)
