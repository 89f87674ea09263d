"""Collectives as one opaque operator of torch's dispatcher, for compilers and other tracers.

The operator has an ordered effect: a compiler neither drops nor reorders it, forward or backward, even where the ranks'
local work differs or a rank does not use the result. At run time it calls the op with the usual transports and checks.

`Traced` wraps an op for `gradmesh.autograd`, so that derivatives of every order and mode work and are traced too. Where
autograd runs over a traced forward, as in an exported program, the operator's registered derivative is the adjoint.

Encode an op as arguments of an operator of torch's dispatcher, and decode it.
An op is a value of dataclasses, tuples, numbers, strings and dtypes. Numbers are encoded separately, since they may be
symbolic (dynamic sizes). The axis is encoded as the name of its process group, so that the arguments are the same on
every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradmesh._torch import constant_to_compilers, keep_order_in_inductor, ordered_effect, resolve_group
from gradmesh._util.caches import BoundedCache
from gradmesh.errors import ArgumentError, OrderError
from gradmesh.ops.base import LinearOp, Op
from gradmesh.ops.neighbor import Picked
from gradmesh.ops.permute import Extents
from gradmesh.ops.sizes import Sizes
from gradmesh.runtime.mesh import Axis
from gradmesh.transport import Transport, traced_transport
from gradmesh.transport.call_checks import BACKWARD, NEEDS_BACKWARD, ZERO_GRAD, CallRecord
from gradmesh.transport.packing import CARRIED, laid_out_as
from gradmesh.transport.run import apply, fake_result, sent


class Encoded(NamedTuple):
    """An op as arguments."""

    words: str  # the names of its classes and dtypes, and placeholders for numbers and tensors, in order
    numbers: list[int]  # its numbers, in order
    tensors: list[Tensor]  # its tensors, in order
    group: str  # the name of the process group


_END = "\x1f"
"""Separator of words; torch.jit.trace does not support lists of str."""
_NUMBER, _TENSOR, _TEXT, _DTYPE, _TUPLE = "#", "@", "'", "torch.", "("
_NONE = ""
"""The group name of an axis of one rank, which has no group."""
_CONSTANTS = {"None": None, "True": True, "False": False}


def encode(op: Op) -> Encoded:
    """Encode an op."""
    words: list[str] = []
    numbers: list[int] = []
    tensors: list[Tensor] = []
    _put(op, words, numbers, tensors)
    group = op.axis.group
    return Encoded(_END.join(words), numbers, tensors, _NONE if group is None else group.group_name)


def _put(value: Any, words: list[str], numbers: list[int], tensors: list[Tensor]) -> None:
    if value is None or value is True or value is False:
        words.append(str(value))
    elif isinstance(value, (int, torch.SymInt)):
        words.append(_NUMBER)
        numbers.append(value)  # type: ignore[arg-type]  # a SymInt stands for an int
    elif isinstance(value, Tensor):
        words.append(_TENSOR)
        tensors.append(value)
    elif isinstance(value, str):
        words.append(_TEXT + value.replace(_END, " "))
    elif isinstance(value, torch.dtype):
        words.append(str(value))
    elif isinstance(value, Axis):
        words.append(_TEXT + value.name)
    elif isinstance(value, tuple):
        words.append(_TUPLE + str(len(value)))
        for each in value:
            _put(each, words, numbers, tensors)
    else:
        words.append(type(value).__name__)
        for name in _fields(type(value)):
            _put(getattr(value, name), words, numbers, tensors)


@constant_to_compilers
def _fields(kind: type[Any]) -> list[str]:
    """The fields that the constructor takes."""
    return [field.name for field in fields(kind) if field.init]


def decode(code: Encoded) -> Op:
    """Decode an op on the calling rank."""
    group = None if code.group == _NONE else resolve_group(code.group)
    if group is None:
        return decoded_on(code, 0, 1, None)
    return decoded_on(code, group.rank(), group.size(), group)


def decoded_on(code: Encoded, rank: int, size: int, group: ProcessGroup | None) -> Op:
    """Decode an op on a rank of an axis; without a group it cannot be applied."""
    words, numbers, tensors = iter(code.words.split(_END)), iter(code.numbers), iter(code.tensors)

    def axis(name: str) -> Axis:
        return Axis(name.removeprefix(_TEXT), rank, size, group)  # type: ignore[arg-type]

    found: Op = _take(words, numbers, tensors, axis)
    return found


def _take(
    words: Iterator[str], numbers: Iterator[int], tensors: Iterator[Tensor], axis: Callable[[str], Axis]
) -> Any:
    word = next(words)
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if word == _NUMBER:
        return next(numbers)
    if word == _TENSOR:
        return next(tensors)
    if word.startswith(_TEXT):
        return word.removeprefix(_TEXT)
    if word.startswith(_DTYPE):
        return getattr(torch, word.removeprefix(_DTYPE))
    if word.startswith(_TUPLE):
        return tuple(_take(words, numbers, tensors, axis) for _ in range(int(word.removeprefix(_TUPLE))))
    kind = _kind(word)
    return kind(
        **{
            name: axis(next(words)) if name == "axis" else _take(words, numbers, tensors, axis)
            for name in _fields(kind)
        }
    )


_kinds: dict[str, type[Any]] = {kind.__name__: kind for kind in (Sizes, Extents, Picked)}


def _kind(name: str) -> type[Any]:
    """The class with a name."""
    if name not in _kinds:
        _kinds.update((kind.__name__, kind) for kind in subclasses(Op))
    if name not in _kinds:
        raise ArgumentError.of(
            f"the exported program calls an unknown op, {name}",
            expected="an op of this version of gradmesh, or an imported subclass of Op",
            got=repr(name),
            remedy="import the module that defines the op, or export the program again with this version",
        )
    return _kinds[name]


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """The subclasses of a class, and theirs."""
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


_decoded = BoundedCache()


def recalled(words: str, numbers: Sequence[int], group: str) -> Op:
    """As `decode`, cached, for plain numbers and no tensors."""
    key = (words, tuple(numbers), group)
    op: Op | None = _decoded.get(key)
    if op is None or op.axis.group is not resolve_group(group):
        op = _decoded[key] = decode(Encoded(words, list(numbers), [], group))
    return op


@torch.library.custom_op(
    "gradmesh::collective",
    mutates_args=(),
    schema="(Tensor x, str words, SymInt[] numbers, Tensor[] tensors, str group, str role, Tensor? origin, bool joins)"
    " -> (Tensor, Tensor)",
    # A tracer runs an op of constants at once, if it has not this tag; the other ranks may trace at another time.
    tags=[torch.Tag.nondeterministic_seeded],
)
def collective(
    x: Tensor,
    words: str,
    numbers: Sequence[int],
    tensors: Sequence[Tensor],
    group: str,
    role: str,
    origin: Tensor | None,
    joins: bool,
) -> tuple[Tensor, Tensor]:
    """Run an op on this rank's tensor.

    Args:
        x: the operand.
        words: the encoded op; this and the next three arguments come from `encode`.
        numbers: its numbers.
        tensors: its tensors.
        group: the name of its process group.
        role: the role of the call, see `CallRecord`.
        origin: the sequence number of its forward call, as returned by that; None: unknown.
        joins: whether the call has a backward, for an op that sends nothing.

    Returns:
        The result, and the sequence number of the call.
    """
    code = Encoded(words, list(numbers), list(tensors), group)
    op = decode(code) if tensors else recalled(words, numbers, group)
    call = CallRecord(role, flags=NEEDS_BACKWARD if (joins or x.requires_grad) and not op.sends else 0)
    if origin is not None:
        number, local = origin.tolist()
        call.origin = CallRecord(number=number, local=local, text="in a compiled program")
    y = apply(op, x, call)
    return y, torch.tensor([call.number, call.local], device="cpu")


@collective.register_fake
def _(
    x: Tensor, words: str, numbers: Sequence[int], tensors: Sequence[Tensor], group: str, *_: object
) -> tuple[Tensor, Tensor]:
    keep_order_in_inductor(torch.ops.gradmesh.collective.default)
    op = decode(Encoded(words, list(numbers), list(tensors), group))
    op.accepts(x.dtype)
    return fake_result(op, x), torch.empty(2, dtype=torch.int64, device="cpu")


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.words, ctx.numbers, tensors, ctx.group, *_ = inputs
    ctx.operand, ctx.result, ctx.dtype, ctx.device = x.shape, output[0].shape, x.dtype, x.device
    ctx.save_for_backward(output[1], *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    """Apply the adjoint as the same operator, where autograd runs over a traced program."""
    place, *tensors = ctx.saved_tensors
    op = decode(Encoded(ctx.words, list(ctx.numbers), tensors, ctx.group))
    if not isinstance(op, LinearOp):
        op.fail(
            "nonlinear reductions have no derivative in an exported program",
            expected="an operand that does not require grad",
            got="an operand that requires grad",
            remedy="pass x.detach(), or call the verb outside of the exported program",
            kind=OrderError,
        )
    nothing = grad is None
    if grad is None:
        grad = torch.zeros(ctx.result, dtype=ctx.dtype, device=ctx.device)
    origin = CallRecord(traced=place)
    back = Traced(op.back).run(grad, CallRecord(BACKWARD, origin, ZERO_GRAD if nothing else 0))
    # torch treats an empty list as a list of tensors
    no_numbers: list[None] | None = None if ctx.numbers else []
    return back, None, no_numbers, [None] * len(tensors), None, None, None, None


collective.register_autograd(_backward, setup_context=_remember)
collective = ordered_effect(collective)


class Traced(LinearOp):
    """An op that runs as an operator of torch's dispatcher, with adjoints of every order."""

    op: Op
    reorderable: bool  # whether symmetric ops become functional collectives, which a compiler may reorder
    # whether autograd traces the call now; otherwise it runs over the traced program at run time, where an op
    # that sends nothing needs its registered derivative too
    followed: bool

    def __init__(self, op: Op, *, reorderable: bool = False, followed: bool = False) -> None:
        params = {
            name: getattr(op, name) for name in ("axis", "comm_dtype", "backward_dtype", "operand_desc")
        }
        own = {"op": op, "reorderable": reorderable, "followed": followed}
        for name, value in {**params, **own}.items():
            object.__setattr__(self, name, value)

    @property
    def verb(self) -> str:  # type: ignore[override]
        """The verb of the op."""
        return self.op.verb

    @property
    def rooted(self) -> bool:  # type: ignore[override]
        """As the op."""
        return self.op.rooted

    def run(self, x: Tensor, recorded: CallRecord | None = None) -> Tensor:
        """Run it as one operator that a tracer records; as torch's own ops where no order has to be kept.

        The call gets its sequence number at run time, so the number is a tensor of the program, which is passed to the
        backward calls.
        """
        y: Tensor
        op, travels = self.op, self.op.comm_dtype or x.dtype
        joins = self.followed and recorded is not None and bool(recorded.flags & NEEDS_BACKWARD)
        silent = self.followed and not op.sends and not (joins and op.sends_back)
        if op.axis.size == 1 or silent or (self.reorderable and op.symmetric and travels in CARRIED):
            op.accepts(x.dtype)
            y = sent(op, x, traced_transport(op.axis))
            return y if x.is_contiguous() else laid_out_as(x, y)
        role, origin = "", None
        if recorded is not None:
            role, origin = recorded.role, recorded.origin and recorded.origin.traced
        y, place = collective(x, *encode(op), role, origin, joins)
        if recorded is not None:
            recorded.traced = place
        return y

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        """As the op."""
        return self.op.transfer(x, wire)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """As the op."""
        return self.op.out_shape(shape)

    def batched(self) -> Traced:
        """The batched op, traced."""
        return Traced(self.op.batched(), reorderable=self.reorderable, followed=self.followed)

    @property
    def adjoint(self) -> LinearOp:
        """The op's adjoint, traced."""
        op: LinearOp = self.op  # type: ignore[assignment]  # other ops have no adjoint
        return Traced(op.adjoint, reorderable=self.reorderable, followed=self.followed)
