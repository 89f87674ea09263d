"""The operators of the simulated device: each is queued on the current stream, where its CPU kernel runs late.

The host works on shapes only, which torch's meta kernels give. What needs a value on the host waits for the stream and
is counted, by line of gradmesh.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

import gradmesh
from tests.simulated_device import build

__all__ = [
    "NAME",
    "Graph",
    "captured",
    "core",
    "counted",
    "delayed",
    "install",
    "is_simulated",
    "launch",
    "raw",
    "waits",
]

NAME = "simulated"
"""The name of the device, as in `torch.device("simulated")`."""
_PACKAGE, _TESTS = Path(gradmesh.__file__).parent, Path(__file__).parents[1]

aten: Any = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

_VIEWS = {
    aten.as_strided.default,
    aten.view.default,
    aten._reshape_alias.default,
    aten.unfold.default,
    aten.view_as_real.default,
    aten.view_as_complex.default,
    aten.alias.default,
}
"""Operators whose CPU kernel reads no values."""
_EMPTY = {aten.empty.memory_format, aten.empty_strided.default}
_UNKNOWN_SIZES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
}
"""Operators whose result has a size that depends on values, so that they make the host wait on every device."""
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
"""Operators that find the positions of a mask first."""


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *others: Any) -> Any:
    sizes = [weight.shape[1] * others[-2] if others[3] else weight.shape[0]]
    return aten.convolution_backward.default(grad, x, weight, sizes, *others)


_OVERRIDEABLE: dict[str, Callable[..., Any]] = {
    "convolution_overrideable": aten.convolution.default,
    "convolution_backward_overrideable": _convolution_backward,
}
"""Operators that torch calls for a device of this kind only, and what they compute."""

_counts: Counter[tuple[str, str]] = Counter()
_installed = False


core = build.module
"""The C++ part."""


def install() -> None:
    """Register the device with torch, for the rest of the process."""
    global _installed
    if _installed:
        return
    _installed = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # generated methods that torch has already
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        _operators.fallback(_run, "PrivateUse1")
        for key in ("Conjugate", "Negative"):  # the copy itself resolves them, as on every device
            _aten.impl("_copy_from", torch.library.fallthrough_kernel, key)
        _operators.fallback(torch.library.fallthrough_kernel, _AUTOCAST)
        for name in ("matmul", "mm", "bmm", "addmm", "linear"):
            _aten.impl(name, functools.partial(_in_autocast, getattr(aten, name).default), _AUTOCAST)
        for name, op in _OVERRIDEABLE.items():
            _aten.impl(name, functools.partial(_overridden, op), "PrivateUse1")
    core().install(_count)


_operators, _aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")


# Before torch 2.10, where the device is not available, this module can be imported all the same.
_Base: Any = getattr(backend_registration, "_DummyBackendModule", object)


class _Module(_Base):
    """What torch looks for as `torch.simulated`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def set_device(self, index: int) -> None: ...

    def current_stream(self, device: object = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    def synchronize(self, device: object = None) -> None:
        torch.accelerator.synchronize()


# ---- what a test sees


@contextlib.contextmanager
def delayed(seconds: float) -> Iterator[None]:
    """Each kernel in the block begins so many seconds after the one before it has ended."""
    core().set_delay(seconds)
    try:
        yield
    finally:
        core().set_delay(0)


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Count the times that the host waits for the device in the block, by kind and line of gradmesh."""
    before = Counter(_counts)
    found: Counter[tuple[str, str]] = Counter()
    try:
        yield found
    finally:
        found.update(_counts - before)


def waits(found: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Those of gradmesh's own lines."""
    return Counter({key: n for key, n in found.items() if key[1] != "test"})


class Graph:
    """Kernels that were captured, which `replay` queues again.

    Attributes:
        kernels: in the order in which they were queued, and between them the memory that was freed, which they fill.
    """

    def __init__(self) -> None:
        self.kernels: list[Callable[[], object]] = []

    def note_freed(self) -> None:
        """Fill what was freed since the last kernel: none that follows may read it."""
        self.kernels += [functools.partial(core().poison, *block) for block in core().take_freed()]

    def replay(self) -> None:
        """Queue all kernels on the current stream."""
        for kernel in self.kernels:
            core().launch_here(kernel)


_capturing: list[Graph] = []


@contextlib.contextmanager
def captured() -> Iterator[Graph]:
    """Capture the kernels of the block instead of running them, as a CUDA graph.

    What CUDA graphs do not allow raises: a wait of the host, and a copy from memory of the host, which is freed before
    the graph is replayed. Memory of the graph is its own; each replay fills with NaN what was freed in the block.
    """
    graph = Graph()
    _capturing.append(graph)
    core().set_capturing(True)
    try:
        yield graph
    finally:
        graph.note_freed()
        core().set_capturing(False)
        _capturing.pop()


def launch(kernel: Callable[[], object], stream: int | None = None) -> None:
    """Queue a kernel, on the current stream by default; during a capture only note it."""
    if _capturing:
        _capturing[-1].note_freed()
        _capturing[-1].kernels.append(kernel)
    elif stream is None:
        core().launch_here(kernel)
    else:
        core().launch(stream, kernel)


def _count(kind: str) -> None:
    """Count a wait for the innermost frame of gradmesh, or of a test that is further inside."""
    if _capturing:
        raise RuntimeError(f"the host waits for the device during a capture: {kind}")
    frame: Any = sys._getframe(1)
    while frame is not None:
        line = _line(frame.f_code.co_filename)
        if line is not None:
            _counts[kind, line if line == "test" else f"{line}:{frame.f_lineno}"] += 1
            return
        frame = frame.f_back
    _counts[kind, "test"] += 1


@functools.cache
def _line(file: str) -> str | None:
    """The file within gradmesh; "test" for one of the tests, None for any other."""
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        return str(path.relative_to(_PACKAGE))
    return "test" if path.is_relative_to(_TESTS) and path.parent != Path(__file__).parent else None


def is_simulated(x: object) -> bool:
    """Whether it is a tensor on the device."""
    return isinstance(x, Tensor) and x.is_simulated  # type: ignore[attr-defined]  # by its name


def raw(x: Tensor) -> Tensor:
    """The memory of a tensor as a CPU tensor, for kernels; it keeps nothing alive."""
    return core().raw(x)


# ---- operators


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    if op in _VIEWS:
        return op.redispatch(_CPU, *args, **kwargs)
    if op is aten._copy_from.default:
        return _copied(*args, **kwargs)
    if op is aten.record_stream.default:
        return core().record_stream(args[0], args[1].stream_id)
    if op is aten._local_scalar_dense.default or op is aten.equal.default:
        core().synchronize_here(op._opname)
        return op(*(raw(x) for x in args))
    if op in _UNKNOWN_SIZES or (op is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
        return _with_values(op, args, kwargs)
    if op._opname in _INDEXED and any(
        x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    ):
        if op is aten.index.Tensor:
            return _with_values(op, args, kwargs)
        if op is aten.index.Tensor_out:  # torch has found the positions, and made `out` of that size
            return _launched(op, args, kwargs)
        core().synchronize_here("nonzero")
    if op is aten._efficientzerotensor.default:
        op = aten.zeros.default
    return _queued(op, op in _EMPTY, args, kwargs)


def _overridden(op: Any, *args: Any) -> Any:
    return _queued(op, False, args, {})


_AUTOCAST = "AutocastPrivateUse1"


def _in_autocast(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator in the dtype of the autocast region."""
    key: Any = torch._C._parse_dispatch_key(_AUTOCAST)
    keys = torch._C.DispatchKeySet(key)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        dtype = torch.get_autocast_dtype(NAME)
        return op(
            *(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args), **kwargs
        )


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if not target.numel():
        return target
    if not is_simulated(target):
        core().synchronize_here("copy to host")
        return target.copy_(_lazily(source))
    if _capturing and not is_simulated(source):
        raise RuntimeError("memory of the host is copied to the device during a capture")
    given = _lazily(source) if is_simulated(source) else source.clone()
    to = _lazily(target)
    launch(lambda: to.copy_(given))
    if not is_simulated(source) and not non_blocking:
        core().synchronize_here(
            "copy to device"
        )  # as on a GPU, where pageable memory is copied on the stream
    return target


def _lazily(x: Tensor) -> Tensor:
    """`raw` with the pending conjugation and sign."""
    made = raw(x)
    made = made.conj() if x.is_conj() else made
    return torch._neg_view(made) if x.is_neg() else made


def _with_values(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator whose sizes are unknown before its operands can be read."""
    core().synchronize_here(op._opname)
    values = op(*_mapped(_as_cpu, args), **_mapped(_as_cpu, kwargs))

    def on_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = core().empty_like(value)
        to = raw(made)
        launch(lambda: to.copy_(value))
        return made

    return pytree.tree_map(on_device, values)


def _launched(op: Any, args: Any, kwargs: Any) -> Any:
    """Queue an operator that only writes into `out`."""
    given, named = _mapped(_as_cpu, args), _mapped(_as_cpu, kwargs)
    launch(lambda: op(*given, **named))
    return kwargs["out"]


def _as_cpu(x: Any) -> Any:
    return raw(x) if is_simulated(x) else torch.device("cpu") if isinstance(x, torch.device) else x


def _queued(op: Any, is_empty: bool, args: Any, kwargs: Any) -> Any:
    shapes: dict[int, tuple[Tensor, Tensor]] = {}

    def as_shape(x: Any) -> Any:
        if isinstance(x, Tensor):
            if not is_simulated(x):
                return _meta_of_cpu(
                    op, x, any(x is each for each in args[1]) if op._opname in _INDEXED else False
                )
            if id(x) not in shapes:
                shapes[id(x)] = x, _meta(x)
            return shapes[id(x)][1]
        if isinstance(x, torch.Generator) and x.device.type != NAME:
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{x.device.type}'")
        return _META if isinstance(x, torch.device) else x

    with torch.no_grad():
        results = op(*_mapped(as_shape, args), **_mapped(as_shape, kwargs))
    operands = {}
    for x, shape in shapes.values():
        operands[id(shape)] = x
        if x.shape != shape.shape or x.stride() != shape.stride():  # resized, as `out=` may be
            core().resize_as(x, shape)
    fresh: list[tuple[int, Tensor]] = []
    leaves, spec = ([results], None) if isinstance(results, Tensor) else pytree.tree_flatten(results)
    made = []
    for number, result in enumerate(leaves):
        y = operands.get(id(result), result)
        if y is result and isinstance(result, Tensor):
            y = core().empty_like(result)
            fresh.append((number, raw(y)))
        made.append(y)
    if not is_empty and op is not aten.resize_.default:
        given, named = _mapped(_as_cpu, args), _mapped(_as_cpu, kwargs)

        def kernel() -> None:
            with torch.no_grad():
                values = op(*given, **named)
            if fresh:
                values = [values] if spec is None else pytree.tree_leaves(values)
                for number, memory in fresh:
                    memory.copy_(values[number])

        launch(kernel)
    return made[0] if spec is None else pytree.tree_unflatten(made, spec)


_META = torch.device("meta")


def _meta_of_cpu(op: Any, x: Tensor, is_index: bool) -> Tensor:
    """The shape of a CPU operand, where CUDA takes one: a number, or positions of rows, which it copies at once."""
    if is_index:
        if x.dtype != torch.bool:
            core().synchronize_here("copy to device")
    elif x.ndim:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {NAME}:0 and cpu! (in {op})"
        )
    return x.to("meta")


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`tree_map` over the arguments of an operator, which are quick to walk."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(_mapped(function, each) for each in value)
    if kind is dict:
        return {name: _mapped(function, each) for name, each in value.items()}
    return function(value)


def _meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
