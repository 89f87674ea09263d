"""Checks and flattens the tensors of a call; copies only those that are not contiguous."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from gradmesh import _torch
from gradmesh._torch import is_fake
from gradmesh.backends.reductions import REDUCTIONS
from gradmesh.backends.shm.epochs import Steps
from gradmesh.backends.shm.p2p import DTYPES
from gradmesh.dtypes import NEVER_COPIED
from gradmesh.errors import ArgumentError, DTypeError, ShapeError, message

__all__ = ["DTYPE_NUMBER", "Results", "elements", "facts", "in_mode_of", "operand", "reducible"]

DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}


class Results:
    """The results of a call as flat tensors, and the copies to make at its end.

    Args:
        shown: returns the group's description, for errors.
    """

    def __init__(self, shown: Callable[[], str]) -> None:
        self._shown = shown
        self._copies: list[tuple[Tensor, Tensor]] = []

    def flat(self, tensor: Tensor, *, keep: bool = False) -> Tensor:
        """A result as a flat tensor, with its current values if `keep`.

        Raises:
            ArgumentError: it is not a dense CPU tensor with values.
            ShapeError: several of its elements share memory.
        """
        _on_cpu(tensor, self._shown)
        # Detached, because autograd may not allow writing to a view.
        plain = tensor.detach()
        if plain.is_contiguous() and not plain.is_neg() and not plain.is_conj():
            return plain if plain.dim() == 1 else plain.view(-1)
        if any(size > 1 and stride == 0 for size, stride in zip(plain.shape, plain.stride(), strict=True)):
            raise ShapeError(
                message(
                    "an output tensor is expanded: several of its elements share memory",
                    axis=self._shown(),
                    expected="a tensor with separate memory for each element",
                    got=f"shape {list(plain.shape)} with strides {list(plain.stride())}",
                    remedy="pass out.clone()",
                )
            )
        dense = _torch.in_plain_mode(partial(_dense_like, plain, keep))
        self._copies.append((plain, dense))
        return dense.view(-1)

    def after(self, calls: Sequence[Steps]) -> Steps:
        """The calls in sequence, then the copies."""
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
    """An operand as a flat tensor in logical element order, for any memory format."""
    _on_cpu(tensor, shown)
    plain = tensor.detach()
    if not plain.is_contiguous() or plain.is_neg() or plain.is_conj():
        plain = _torch.in_plain_mode(partial(_dense_like, plain, True))
    return plain if plain.dim() == 1 else plain.view(-1)


def _dense_like(tensor: Tensor, keep: bool) -> Tensor:
    """A contiguous tensor of the same shape, with the same values if `keep`."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype)
    return dense.copy_(tensor) if keep else dense


def _on_cpu(tensor: Tensor, shown: Callable[[], str]) -> None:
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized or is_fake(tensor):
        raise ArgumentError(
            message(
                "the shm backend supports only dense CPU tensors",
                axis=shown(),
                expected="a dense CPU tensor with values",
                got=f"a {type(tensor).__name__} on {tensor.device}, {tensor.layout}, {tensor.dtype}",
                remedy="for CUDA tensors create a second group: torch.distributed.new_group(backend='nccl')",
            )
        )
    if tensor.dtype in NEVER_COPIED:
        raise DTypeError(
            message(
                "unsupported dtype: torch implements no copy kernel for it",
                axis=shown(),
                expected="a dtype that torch copies",
                got=str(tensor.dtype),
                remedy="send its bytes, x.view(torch.uint8), and view them back on the other ranks",
            )
        )


_reducible: set[tuple[torch.dtype, str]] = set()


def reducible(flat: Tensor, op: str) -> None:
    """Check that torch supports the reduction for this dtype, before anything is sent.

    Raises:
        DTypeError: torch does not support it.
    """
    if (flat.dtype, op) in _reducible:
        return
    try:
        _torch.in_plain_mode(lambda: REDUCTIONS[op](flat[:0], flat[:0]))
    except RuntimeError as error:
        raise DTypeError(
            message(
                f"reduction {op} is not implemented for {flat.dtype}",
                expected="a dtype for which torch implements the reduction",
                got=f"{flat.dtype}: {error}",
                remedy="convert the tensor first, e.g. x.float() for SUM or x.int() for BAND, BOR and BXOR",
            )
        ) from error
    _reducible.add((flat.dtype, op))


def in_mode_of(tensors: Sequence[Tensor], work: Callable[[], object]) -> None:
    """Run `work`, which writes to the tensors, in inference mode if they are inference tensors."""
    if tensors[0].is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            work()
    else:
        work()


def facts(flat: Tensor) -> tuple[int, int]:
    """The properties of a tensor that ranks compare: the number of its dtype, and its size."""
    return DTYPE_NUMBER[flat.dtype], flat.numel()


def elements(tensor: Tensor, rows: Sequence[int]) -> list[int]:
    """The number of elements in the given numbers of rows of dim 0."""
    each = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return [row * each for row in rows]
