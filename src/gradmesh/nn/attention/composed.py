"""The same attention made of operators that have every derivative, with all scores of a hop at once.

Forward mode, vmap and compiled programs run the first half, and whoever differentiates the gradient runs the second
one. A score that is not to be taken is taken and weighs nothing, so that every rank uses every block: else the ranks
would not run the same backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradmesh.nn.attention.blocks import wide
from gradmesh.nn.attention.ring import Ring
from gradmesh.nn.attention.tiles import mask
from gradmesh.ops.permute import Shift

__all__ = ["Run", "attention", "gradients"]

Run = Callable[[Shift, Tensor], Tensor]
"""Makes a call, differentiably."""


def attention(ring: Ring, q: Tensor, k: Tensor, v: Tensor, run: Run) -> Tensor:
    """What the rows see.

    Args:
        ring: the call.
        q: this rank's rows.
        k: its keys.
        v: its values.
        run: hands a block on.
    """
    rows = q.to(wide(q.dtype)) * ring.scale
    block = torch.cat((k, v), -1)
    top = rows.new_full((1, 1, 1, 1), -torch.inf)
    weight: Tensor | float = 0.0
    out: Tensor | float = 0.0
    for hop in range(ring.axis.size):
        keys, values = block.to(rows.dtype).split(ring.features, -1)
        scores = (rows @ keys.mT).masked_fill(~_mask(ring, hop, q, keys), -torch.inf)
        # What is taken off before exp has no part in the result, and so no gradient.
        before = top
        if keys.shape[2]:
            top = torch.maximum(before, scores.detach().amax(-1, keepdim=True))
        finite = top.masked_fill(top == -torch.inf, 0)
        less, weights = (before - finite).exp(), (scores - finite).exp()
        weight = weights.sum(-1, keepdim=True) + less * weight
        out = weights @ values + less * out
        if hop < ring.axis.size - 1:
            block = run(ring.op(hop), block)
    return (out / (weight + (weight == 0))).to(q.dtype)  # type: ignore[union-attr]  # there is a hop


def gradients(
    ring: Ring,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grad: Tensor,
    grad_lse: Tensor | None,
    run: Run,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by the own rows, keys and values, as `gradmesh.nn.attention.ring.backward` has them.

    Args:
        ring: the call.
        saved: rows, keys, values, what was seen and its logsumexp.
        grad: the gradient of what was seen.
        grad_lse: that of the logsumexp; None: there is none.
        run: hands a block on.
    """
    q, k, v, out, lse = saved
    dtype, size = wide(q.dtype), ring.axis.size
    rows, given = q.to(dtype), grad.to(dtype)
    less = (given * out).sum(-1, keepdim=True)
    if grad_lse is not None:
        less = less - grad_lse.unsqueeze(-1)
    finite = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
    dq, block, back = torch.zeros_like(rows), torch.cat((k, v), -1), None
    for hop in range(size):
        keys, values = block.to(dtype).split(ring.features, -1)
        following = run(ring.op(hop), block) if hop < size - 1 else None
        scores = (rows @ keys.mT * ring.scale).masked_fill(~_mask(ring, hop, q, keys), -torch.inf)
        weights = (scores - finite).exp()
        slopes = weights * (given @ values.mT - less) * ring.scale
        dq = dq + slopes @ keys
        dk, dv = (slopes.mT @ rows).sum_to_size(keys.shape), (weights.mT @ given).sum_to_size(values.shape)
        mine = torch.cat((dk, dv), -1)
        back = mine if back is None else back + mine
        if size > 1:
            back = run(ring.op(hop), back)
        if following is not None:
            block = following
    dk, dv = back.split(ring.features, -1)  # type: ignore[union-attr]  # there is a hop
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _mask(ring: Ring, hop: int, q: Tensor, keys: Tensor) -> Tensor:
    return mask(ring.tiles(hop), q.shape[0], q.shape[2], keys.shape[2], q.device)
