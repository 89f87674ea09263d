"""Ring attention composed of differentiable operators, with all scores of a hop in memory at once.

`attention` serves forward mode, vmap and compiled programs; `gradients` serves double backward. Masked scores are
computed and get weight 0, so that every rank uses every block and all ranks run the same backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradmesh.nn.attention.blocks import accumulator
from gradmesh.nn.attention.ring import Ring
from gradmesh.nn.attention.tiles import mask
from gradmesh.ops.permute import Shift

__all__ = ["Run", "attention", "gradients"]

Run = Callable[[Shift, Tensor], Tensor]
"""Runs a collective, differentiably."""


def attention(ring: Ring, q: Tensor, k: Tensor, v: Tensor, run: Run) -> Tensor:
    """The attention output of this rank's queries; `run` sends a block to the next rank."""
    rows = q.to(accumulator(q.dtype)) * ring.scale
    block = torch.cat((k, v), -1)
    top = rows.new_full((1, 1, 1, 1), -torch.inf)
    weight: Tensor | float = 0.0
    out: Tensor | float = 0.0
    for hop in range(ring.axis.size):
        keys, values = block.to(rows.dtype).split(ring.features, -1)
        scores = (rows @ keys.mT).masked_fill(~_mask(ring, hop, q, keys), -torch.inf)
        # The maximum cancels out of the result, so it is detached.
        before = top
        if keys.shape[2]:
            top = torch.maximum(before, scores.detach().amax(-1, keepdim=True))
        finite = top.masked_fill(top == -torch.inf, 0)
        less, weights = (before - finite).exp(), (scores - finite).exp()
        weight = weights.sum(-1, keepdim=True) + less * weight
        out = weights @ values + less * out
        if hop < ring.axis.size - 1:
            block = run(ring.op(hop), block)
    return (out / (weight + (weight == 0))).to(q.dtype)  # type: ignore[union-attr]  # there is at least one hop


def gradients(
    ring: Ring,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grad: Tensor,
    grad_lse: Tensor | None,
    run: Run,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to the local q, k and v.

    Args:
        ring: the call.
        saved: q, k, v, the output and its logsumexp.
        grad: the gradient of the output.
        grad_lse: the gradient of the logsumexp, or None.
        run: sends a block to the next rank.
    """
    q, k, v, out, lse = saved
    dtype, size = accumulator(q.dtype), ring.axis.size
    rows, dout = q.to(dtype), grad.to(dtype)
    less = (dout * out).sum(-1, keepdim=True)
    if grad_lse is not None:
        less = less - grad_lse.unsqueeze(-1)
    finite = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
    dq, block, back = torch.zeros_like(rows), torch.cat((k, v), -1), None
    for hop in range(size):
        keys, values = block.to(dtype).split(ring.features, -1)
        following = run(ring.op(hop), block) if hop < size - 1 else None
        scores = (rows @ keys.mT * ring.scale).masked_fill(~_mask(ring, hop, q, keys), -torch.inf)
        weights = (scores - finite).exp()
        ds = weights * (dout @ values.mT - less) * ring.scale
        dq = dq + ds @ keys
        dk, dv = (ds.mT @ rows).sum_to_size(keys.shape), (weights.mT @ dout).sum_to_size(values.shape)
        local = torch.cat((dk, dv), -1)
        back = local if back is None else back + local
        if size > 1:
            back = run(ring.op(hop), back)
        if following is not None:
            block = following
    dk, dv = back.split(ring.features, -1)  # type: ignore[union-attr]  # there is at least one hop
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _mask(ring: Ring, hop: int, q: Tensor, keys: Tensor) -> Tensor:
    return mask(ring.tiles(hop), q.shape[0], q.shape[2], keys.shape[2], q.device)
