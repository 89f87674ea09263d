"""Tensors on their way into a call and out of it: checked, flat, and copied only where they do not lie in one piece."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from gradmesh import _torch
from gradmesh._torch import is_fake
from gradmesh.backends.reductions import REDUCTIONS
from gradmesh.backends.shm.p2p import DTYPES
from gradmesh.backends.shm.phases import Steps
from gradmesh.dtypes import NEVER_COPIED
from gradmesh.errors import ArgumentError, DTypeError, ShapeError, message

__all__ = ["DTYPE_NUMBER", "Results", "elements", "facts", "in_mode_of", "operand", "reducible"]

DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}


class Results:
    """The results of a call as flat tensors, and what is to be copied when it is over.

    Args:
        shown: the group, for error texts.
    """

    def __init__(self, shown: Callable[[], str]) -> None:
        self._shown = shown
        self._copies: list[tuple[Tensor, Tensor]] = []

    def flat(self, tensor: Tensor, *, keep: bool = False) -> Tensor:
        """A result as a flat tensor, with what is in it now if `keep`.

        Raises:
            ArgumentError: it is not a dense CPU tensor with values.
            ShapeError: several of its elements are one place in memory.
        """
        _on_cpu(tensor, self._shown)
        # Without its history, and no view of another tensor, which autograd might not allow to write.
        plain = tensor.detach()
        if plain.is_contiguous() and not plain.is_neg() and not plain.is_conj():
            return plain if plain.dim() == 1 else plain.view(-1)
        if any(size > 1 and stride == 0 for size, stride in zip(plain.shape, plain.stride(), strict=True)):
            raise ShapeError(
                message(
                    "a result is expanded: several of its elements are one place in memory",
                    axis=self._shown(),
                    expected="a tensor with a place for each element",
                    got=f"shape {list(plain.shape)} with strides {list(plain.stride())}",
                    remedy="pass its .clone()",
                )
            )
        dense = _torch.in_plain_mode(partial(_dense_like, plain, keep))
        self._copies.append((plain, dense))
        return dense.view(-1)

    def after(self, calls: Sequence[Steps]) -> Steps:
        """The calls one after another, and then the copies."""
        if len(calls) == 1 and not self._copies:
            return calls[0]
        return itertools.chain(itertools.chain.from_iterable(calls), self._finally())

    def _finally(self) -> Iterator[None]:
        self.copy()
        yield from ()

    def copy(self) -> None:
        """Copy now."""
        for tensor, dense in self._copies:
            tensor.copy_(dense)


def operand(tensor: Tensor, shown: Callable[[], str]) -> Tensor:
    """An operand as a flat tensor, in the order of its elements whatever its memory format is."""
    _on_cpu(tensor, shown)
    plain = tensor.detach()
    if not plain.is_contiguous() or plain.is_neg() or plain.is_conj():
        plain = _torch.in_plain_mode(partial(_dense_like, plain, True))
    return plain if plain.dim() == 1 else plain.view(-1)


def _dense_like(tensor: Tensor, keep: bool) -> Tensor:
    """A tensor of the same shape in one piece, with the same values if they are to be kept."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype)
    return dense.copy_(tensor) if keep else dense


def _on_cpu(tensor: Tensor, shown: Callable[[], str]) -> None:
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized or is_fake(tensor):
        raise ArgumentError(
            message(
                "the shm backend takes dense tensors on the CPU",
                axis=shown(),
                expected="a dense CPU tensor with values",
                got=f"a {type(tensor).__name__} on {tensor.device}, {tensor.layout}, {tensor.dtype}",
                remedy="for CUDA tensors make a second group: torch.distributed.new_group(backend='nccl')",
            )
        )
    if tensor.dtype in NEVER_COPIED:
        raise DTypeError(
            message(
                "torch has a name for this dtype, and nothing that copies it",
                axis=shown(),
                expected="a dtype that torch copies",
                got=str(tensor.dtype),
                remedy="send its bytes: x.view(torch.uint8)",
            )
        )


_reducible: set[tuple[torch.dtype, str]] = set()


def reducible(flat: Tensor, op: str) -> None:
    """Refuse what torch's own kernel refuses, before anything is sent.

    Raises:
        DTypeError: torch does not reduce this dtype so.
    """
    if (flat.dtype, op) in _reducible:
        return
    try:
        _torch.in_plain_mode(lambda: REDUCTIONS[op](flat[:0], flat[:0]))
    except RuntimeError as error:
        raise DTypeError(
            message(
                f"torch has no {op} for this dtype",
                expected="a dtype that torch reduces so",
                got=f"{flat.dtype}: {error}",
                remedy="convert the tensor first, or reduce it otherwise",
            )
        ) from error
    _reducible.add((flat.dtype, op))


def in_mode_of(tensors: Sequence[Tensor], work: Callable[[], object]) -> None:
    """Write to tensors, in inference mode if they are of it."""
    if tensors[0].is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            work()
    else:
        work()


def facts(flat: Tensor) -> tuple[int, int]:
    """What the ranks compare of a tensor: its dtype's number and its elements."""
    return DTYPE_NUMBER[flat.dtype], flat.numel()


def elements(tensor: Tensor, rows: Sequence[int]) -> list[int]:
    """The elements in so many rows of dim 0."""
    each = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return [row * each for row in rows]
