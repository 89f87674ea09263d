"""Numbers that tell values apart: of a tensor's bits, and of what made a value out of others.

Two values with the same number were made by the same operators of the same arguments out of the same bits. So they are
the same bits, wherever they are, and ranks can compare numbers in the place of values.
"""

from __future__ import annotations

import cmath
import ctypes
import hashlib
from typing import Any

import torch
from torch import Tensor

from gradmesh._torch import is_fake

__all__ = ["number_of_bits", "observable", "said", "same_summed", "token", "within"]


def token(*words: object) -> int:
    """64 bits of words and numbers.

    >>> token("add", 1) == token("add", 1) != token("add", 2)
    True
    """
    made = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(made, "little", signed=True)


def said(value: Any) -> object:
    """An argument other than a tensor, as a value that is equal on ranks that pass equal arguments."""
    if isinstance(value, list | tuple):
        return [said(one) for one in value]
    if isinstance(value, torch.device):
        return value.type
    if value is None or isinstance(
        value, bool | int | float | complex | str | torch.dtype | torch.layout | torch.memory_format
    ):
        return str(value) if isinstance(value, torch.dtype) else value
    return type(value).__name__


def within(x: Tensor) -> Tensor:
    """The tensor with memory that another one wraps: a DTensor's own part, what a functional collective returns."""
    while _wraps(x) and hasattr(x, "__tensor_flatten__"):
        if hasattr(x, "trigger_wait"):  # it may be under way
            x.trigger_wait()
        parts = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if len(tensors) != 1:
            break
        x = tensors[0]
    return x


def _wraps(x: Tensor) -> bool:
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def observable(x: Tensor) -> bool:
    """Whether a tensor's bits can be looked at: it has memory of its own, and a value at each place of it."""
    plain = x.layout is torch.strided and not x.is_quantized and not x.is_nested
    return plain and x.device.type != "meta" and not _wraps(x) and not is_fake(x)


def number_of_bits(x: Tensor) -> int:
    """A 64-bit digest of a tensor's memory, dtype, shape and strides.

    >>> x = torch.tensor([0.0, 1.0])
    >>> number_of_bits(x) == number_of_bits(x.clone()) != number_of_bits(x.flip(0))
    True
    """
    whole = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    length = whole.numel() * whole.itemsize
    memory = (ctypes.c_char * length).from_address(whole.data_ptr()) if length else b""
    made = hashlib.blake2b(memory, digest_size=8)
    made.update(f"{x.dtype} {tuple(x.shape)} {x.stride()}".encode())
    return int.from_bytes(made.digest(), "little", signed=True)


def same_summed(value: Any) -> bool:
    """Whether the sum of a value over ranks that all have it is the value: every element is 0, infinite or NaN.

    >>> same_summed(float("-inf")), same_summed(torch.tensor([0.0, -torch.inf])), same_summed(1.0)
    (True, True, False)
    """
    if isinstance(value, Tensor):
        return observable(value) and not bool(((value != 0) & value.isfinite()).any())
    return isinstance(value, int | float | complex) and (not value or not cmath.isfinite(value))
