"""Ring attention: keys and values go round the ranks while the queries attend to those that are there.

Each rank has the queries, keys and values of its part of a sequence. Its keys and values are cut into blocks, which
are handed to the next rank one after another: a block is handed on before it is attended to, so that it travels
meanwhile. The softmax is taken as the blocks come, exactly (M. Milakov and N. Gimelshein, "Online normalizer
calculation for softmax", 2018; H. Liu, M. Zaharia and P. Abbeel, "Ring attention with blockwise transformers for
near-infinite context", 2023). In backward the gradients of the blocks go round the other way, behind the gradients of
what is attended to; nothing is written for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import gradmesh as gm
from tools.overlap.chain import Done, Waitable


def begin_shift(block: Tensor) -> Waitable:
    """Begin to hand a block to the next rank, and to take one from the rank before."""
    return gm.shift(block, async_op=True)


class _Seen(NamedTuple):
    """The attention to the blocks so far: (..., queries, 1), the same, and (..., queries, features)."""

    top: Tensor
    weight: Tensor
    out: Tensor


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: int = 8,
    ranks: int | None = None,
    begin: Callable[[Tensor], Waitable] = begin_shift,
) -> Tensor:
    """Attend to the keys and values of all ranks."""
    around = gm.world_size() if ranks is None else ranks
    own = zip(k.chunk(blocks, -2), v.chunk(blocks, -2), strict=True)
    coming: list[Waitable] = [Done(torch.stack(block)) for block in own]
    seen: _Seen | None = None
    for hop in range(around):
        following: list[Waitable] = []
        for arriving in coming:
            block = arriving.wait()
            if hop < around - 1:
                following.append(begin(block))
            seen = attend(q, block[0], block[1], seen)
        coming = following
    if seen is None:
        return torch.zeros_like(q)
    return seen.out / seen.weight


def attend(q: Tensor, k: Tensor, v: Tensor, seen: _Seen | None) -> _Seen:
    """Attend to one more block."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    # The result does not depend on it, and so has no gradient by it.
    top = scores.detach().amax(-1, keepdim=True)
    if seen is not None:
        top = torch.maximum(top, seen.top)
    weights = (scores - top).exp()
    weight, out = weights.sum(-1, keepdim=True), weights @ v
    if seen is None:
        return _Seen(top, weight, out)
    less = (seen.top - top).exp()
    return _Seen(top, weight + less * seen.weight, out + less * seen.out)
