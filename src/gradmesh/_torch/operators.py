"""Operators in a dispatch mode: their arguments, what they write, tensor versions. Kernels without a public name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.weak import WeakIdKeyDictionary

from gradmesh._torch.names import RELIED_ON_LATER, Attribute, find, getter, refuse, required

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

_MODE = "torch.utils._python_dispatch.TorchDispatchMode"
_SCHEMA = "torch.ops.aten.add.Tensor._schema"
_UNBOX = "torch._C._distributed_c10d.ProcessGroup.unbox"
_NO_TYPES = "gradmesh.typed raises"
_mode, _schema = find(_MODE, without=_NO_TYPES), find(_SCHEMA, without=_NO_TYPES)
_unbox = find(
    _UNBOX,
    without="gradmesh.typed treats results of raw collectives as new tensors and infers their types from values",
)

if TYPE_CHECKING:
    DispatchMode = TorchDispatchMode
else:
    DispatchMode = object if _mode is None else _mode

WeakTensors = WeakIdKeyDictionary


def need_dispatch() -> None:
    """Raise if dispatch modes or operator schemas are not available.

    Raises:
        TorchVersionError: this torch lacks them.
    """
    if _mode is None or _schema is None:
        refuse("types of tensors", _MODE, _SCHEMA)


@functools.cache
def arguments_of(func: Any) -> tuple[tuple[str, bool], ...]:
    """The arguments of an operator: name, and whether the operator writes to it.

    >>> arguments_of(torch.ops.aten.relu_.default)
    (('self', True),)
    """
    return tuple(
        (arg.name, arg.alias_info is not None and arg.alias_info.is_write) for arg in func._schema.arguments
    )


@functools.cache
def out_arguments(func: Any) -> tuple[str, ...]:
    """The names of the arguments that an operator puts its results into.

    >>> out_arguments(torch.ops.aten.exp.out)
    ('out',)
    """
    return tuple(arg.name for arg in func._schema.arguments if arg.is_out)


@functools.cache
def gives_view(func: Any) -> bool:
    """Whether the result of an operator is a view of what it takes."""
    infos = [each.alias_info for each in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


@functools.cache
def dispatched_name(func: Any) -> tuple[str, str]:
    """The namespace and the name of an operator, without the overload.

    >>> dispatched_name(torch.ops.aten.add.Tensor)
    ('aten', 'add')
    """
    space, name = func._schema.name.split("::")
    return space, name


_version = getter("torch._C.TensorBase._version", "gradmesh.typed")


def version_of(x: Tensor) -> int:
    """The version counter of a tensor; -1 if it has none."""
    try:
        version: int = _version(x)
    except RuntimeError:  # an inference tensor
        return -1
    return version


base_of: Callable[[Tensor], Tensor | None] = getter("torch._C.TensorBase._base", "gradmesh check")
"""The tensor that a tensor is a view of, or None."""

is_view: Callable[[Tensor], bool] = required("torch._C.TensorBase._is_view", "gradmesh check")
"""Whether a tensor is a view."""


_LOCAL = Attribute("torch.distributed.tensor.DTensor._local_tensor", "gradmesh check")


def local_part(x: Any) -> Any:
    """This rank's part of a DTensor, without `to_local`, which modes see; any other object itself."""
    return _LOCAL.of(x, x)


_OPENED = "gradmesh check of a script with operators of its own"
_names = required("torch._C._dispatch_get_all_op_names", _OPENED)
for _path in ("torch._C.DispatchKeySet", "torch._C.DispatchKey.CPU"):  # without them, torch is not imported
    RELIED_ON_LATER[_path] = f"{_OPENED} raises an error"


def namespaces() -> frozenset[str]:
    """The namespaces of operators that exist in this process."""
    return frozenset(name.partition("::")[0] for name in _names())


def run_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what implements an operator for CPU tensors, whose own operators are dispatched as those of a program."""
    return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


_EXPLICIT = Attribute(
    "torch.distributed.tensor._dispatch.ExplicitRedistributionContext", "gradmesh check --redistributions"
)


def redistribution_observer(*default: object) -> Any:
    """The class whose `observe_redistribution` DTensor calls before it redistributes an operand by itself."""
    from torch.distributed.tensor import _dispatch

    return _EXPLICIT.of(_dispatch, *default)


def group_behind(boxed: Any) -> torch.distributed.ProcessGroup | None:
    """The process group argument of a c10d operator; None if it cannot be determined."""
    if _unbox is None:
        return None
    try:
        group: torch.distributed.ProcessGroup = _unbox(boxed)
        return group
    except (RuntimeError, TypeError):
        return None


def arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator call by name."""
    return {**dict(zip((name for name, _ in arguments_of(func)), args, strict=False)), **kwargs}


@functools.cache
def written(func: Any) -> frozenset[str]:
    """The names of the arguments that an operator writes to."""
    return frozenset(name for name, is_written in arguments_of(func) if is_written)


@functools.cache
def is_random(func: Any) -> bool:
    """Whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


for _path in ("torch.classes.c10d.ReduceOp.op", "torch.distributed.ProcessGroup._register_backend"):
    RELIED_ON_LATER[_path] = "gradmesh check raises an error"


@functools.cache
def _pair() -> list[Any]:
    """The ranks of a group of two, which both are this process."""
    store, cpu, kind = dist.HashStore(), torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO  # type: ignore[attr-defined]

    def of(rank: int) -> Any:
        group, gloo = (
            dist.ProcessGroup(store, rank, 2),
            dist.ProcessGroupGloo(store, rank, 2, timedelta(0, 60)),
        )
        group._register_backend(cpu, kind, gloo)
        return group.boxed()

    with ThreadPoolExecutor(2) as both:
        return list(both.map(of, range(2)))


def reduction_of(boxed: Any) -> str:
    """The reduction of a c10d operator, in lower case. Torch 2.9 does not name it: there it is applied to 6 and 3."""
    if torch.__version__ >= "2.10":
        return str(dist.ReduceOp.RedOpType(int(boxed.op())).name).lower()
    x, y = (torch.tensor([number], dtype=torch.float64) for number in (6, 3))
    try:
        pairs = zip((x, y), _pair(), strict=True)
        for work in [torch.ops.c10d.allreduce_([each], group, boxed, None)[1] for each, group in pairs]:
            work.wait()
    except (RuntimeError, ValueError):  # of bits, which floats do not have
        return "other"
    return {9.0: "sum", 4.5: "avg", 18.0: "product", 3.0: "min", 6.0: "max"}.get(x.item(), "other")


_TILES = "attention over a sharded sequence computes plain matrix products on the devices of this operator"


class FusedAttention:
    """An attention kernel of torch that returns the logsumexp of each row's scores, and its backward.

    Operands are (batch, heads, sequence, features); k and v may have one head. Arguments are passed by name. The first
    use tries both operators without data: a torch that names an argument otherwise does without them.

    `able` says whether torch has the kernel for q, k and v, and a causal mask or none. The length of the kernel's
    logsumexp is a multiple of `multiple`; 0: it takes any strides of its operands.
    """

    def __init__(
        self, name: str, able: Callable[[Tensor, Tensor, Tensor, bool], bool], multiple: int = 0
    ) -> None:
        path = f"torch.ops.aten._scaled_dot_product_{name}"
        self._forward, self._backward = (
            find(f"{path}{end}.default", without=_TILES) for end in ("", "_backward")
        )
        self._able, self._multiple = able, multiple

    def takes(self, q: Tensor, k: Tensor, v: Tensor, diagonal: bool) -> bool:
        """Whether the kernel can be used; an empty operand would crash it."""
        return min(q.numel(), k.numel()) > 0 and self._able(q, k, v, diagonal) and self._lse_dim > 0

    @functools.cached_property
    def _lse_dim(self) -> int:
        """The number of dimensions of its logsumexp; 0: torch lacks the operators, or has others of that name."""
        x = torch.empty(1, 1, 8, 8, device="meta")
        try:
            out, lse = self._called(self._forward, query=x, key=x, value=x, is_causal=True, scale=1.0)[:2]
            self._lse_dim = lse.dim()
            self.backward(x, x, x, x, out, lse.flatten(2)[..., :8], diagonal=True, scale=1.0)
        except (AttributeError, TypeError, RuntimeError):
            return 0
        return self._lse_dim

    def _called(self, operator: Any, **given: Any) -> Any:
        given |= {"dropout_p": 0.0, "attn_bias": None, "compute_log_sumexp": True}
        return operator(**{name: given[name] for name, _ in arguments_of(operator) if name in given})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, diagonal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Attention, and the logsumexp of each row's scores; `diagonal`: row i attends to keys up to i (causal).

        >>> x = torch.zeros(1, 1, 4, 2)
        >>> fused_attention(x, x, x, False).forward(x, x, x, False, 1.0)[1].exp()
        tensor([[[4., 4., 4., 4.]]])
        """
        q, k, v = (_in_rows(x.expand(-1, q.shape[1], -1, -1)) for x in (q, k, v))
        out, lse = self._called(self._forward, query=q, key=k, value=v, is_causal=diagonal, scale=scale)[:2]
        return out, lse.flatten(2)[..., : q.shape[2]]

    def backward(self, *given: Tensor, diagonal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, from (grad, q, k, v, out, lse); out and lse may include more keys than k."""
        *operands, lse = given
        heads, groups = (x.shape[1] for x in given[1:3])
        grad, q, k, v, out = (_in_rows(x.expand(-1, heads, -1, -1)) for x in operands)
        if self._multiple:
            grad, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, out))
            lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % self._multiple)).contiguous()
            lse = lse.view(*lse.shape, *[1] * (self._lse_dim - lse.dim()))
        unread = q.new_empty(2, dtype=torch.uint64)  # the generator's state, without dropout
        found = self._called(
            self._backward,
            **dict.fromkeys(("grad_out", "grad_out_"), grad),
            **dict.fromkeys(("philox_seed", "philox_offset"), unread),
            query=q, key=k, value=v, out=out, logsumexp=lse,
            cum_seq_q=None, cum_seq_k=None, max_q=q.shape[2], max_k=k.shape[2],
            grad_input_mask=[True, True, True, False], is_causal=diagonal, scale=scale,
        )  # fmt: skip
        dq, dk, dv = found[:3]
        return (dq, dk, dv) if heads == groups else (dq, *(x.sum(1, keepdim=True) for x in (dk, dv)))


def _on_cuda(query: Callable[[Any], bool]) -> Callable[[Tensor, Tensor, Tensor, bool], bool]:
    """What torch says; the kernels themselves take multiples of eight features."""

    def able(q: Tensor, k: Tensor, v: Tensor, diagonal: bool) -> bool:
        if torch.version.hip or q.shape[-1] % 8 or v.shape[-1] % 8:
            return False
        with torch.enable_grad():  # whether it has a backward too
            q, k, v = (x.detach().expand(-1, q.shape[1], -1, -1).requires_grad_() for x in (q, k, v))
            return query(torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, diagonal, False))

    return able


KERNELS = {
    "cpu": [FusedAttention("flash_attention_for_cpu", lambda _, k, v, __: k.shape[-1] == v.shape[-1])],
    "cuda": [
        FusedAttention("flash_attention", _on_cuda(torch.backends.cuda.can_use_flash_attention), 1),
        FusedAttention("efficient_attention", _on_cuda(torch.backends.cuda.can_use_efficient_attention), 32),
        FusedAttention("cudnn_attention", _on_cuda(torch.backends.cuda.can_use_cudnn_attention), 1),
    ],
}
"""The kernels of each type of device, the first that can be used first."""


def fused_attention(q: Tensor, k: Tensor, v: Tensor, diagonal: bool) -> FusedAttention | None:
    """The kernel for these operands; None: there is none.

    `torch.nn.attention.sdpa_kernel` selects on CUDA, as for torch's own function.
    """
    kernels = KERNELS.get(q.device.type, [])
    return next((kernel for kernel in kernels if kernel.takes(q, k, v, diagonal)), None)


def _in_rows(x: Tensor) -> Tensor:
    """The tensor with contiguous, non-overlapping rows; the kernels misread other strides."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


# The public function imports the compiler, to configure it too, which takes seconds.
_set = required("torch._C._set_deterministic_algorithms", "gm.verify.audit")


def fill_fresh_memory(on: bool) -> bool:
    """Switch filling of uninitialized memory (torch.empty) with NaN on or off, for the whole process.

    torch does this while deterministic algorithms are enabled, unless `torch.utils.deterministic` disables it.

    Returns:
        Whether they were enabled before; if so, nothing is changed.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if before and not warns:
        return True
    _set(on, warn_only=True)
    return before


_config = find(
    "torch.profiler._ExperimentalConfig",
    without="a profile contains only one thread of each process, so only one of several thread ranks",
)


def profiler_of_all_threads() -> profile:
    """A profiler, not started, that includes the library's threads and all thread ranks.

    Two concurrent profilers in one process cause a segmentation fault (torch 2.13).
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    every: dict[str, Any] = {}
    if _config is not None:
        every["experimental_config"] = _config(profile_all_threads=True)
    return profile(activities=activities, acc_events=True, **every)
