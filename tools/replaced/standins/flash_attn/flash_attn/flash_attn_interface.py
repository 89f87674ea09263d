"""The functions that ring-flash-attention calls, and those that its tests compare it with.

Queries, keys and values are (batch, sequence, heads, features), or (all sequences, heads, features) where `varlen` has
the bounds of each. With fewer queries than keys, a causal mask is that of the last queries. Dropout, windows and slopes
are not there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _weights(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """The scores of each head."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(wide), k.to(wide)) * scale
    if causal:
        rows, keys = scores.shape[-2:]
        later = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(keys - rows + 1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _weights(q, k, scale, causal)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.to(scores.dtype))
    return out.to(q.dtype), scores.logsumexp(-1)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """From the result and the logsumexp of all keys, of which `k` may be some."""
    scores = _weights(q, k, scale, causal)
    heads, groups, dout = q.shape[2], k.shape[2], dout.to(scores.dtype)
    weights = (scores - lse.unsqueeze(-1)).exp()
    each = v.repeat_interleave(heads // groups, 2).to(scores.dtype)
    less = (dout * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    slope = weights * (torch.einsum("bqhd,bkhd->bhqk", dout, each) - less) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", slope, k.repeat_interleave(heads // groups, 2).to(scores.dtype))
    dk = torch.einsum("bhqk,bqhd->bkhd", slope, q.to(scores.dtype)).unflatten(2, (groups, -1)).sum(3)
    dv = torch.einsum("bhqk,bqhd->bkhd", weights, dout).unflatten(2, (groups, -1)).sum(3)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _refuse(dropout_p: float, window: tuple[int, int], alibi_slopes: Tensor | None) -> None:
    if dropout_p or window != (-1, -1) or alibi_slopes is not None:
        raise NotImplementedError("dropout, windows and slopes are not there without kernels")


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    _refuse(dropout_p, (window_size_left, window_size_right), alibi_slopes)
    return *_forward(q, k, v, softmax_scale, causal), None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:
    _refuse(dropout_p, (window_size_left, window_size_right), alibi_slopes)
    found = _backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
    for into, x in zip((dq, dk, dv), found, strict=True):
        into.copy_(x)


def _spans(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    both = (pairwise(cu.tolist()) for cu in (cu_seqlens_q, cu_seqlens_k))
    return [(slice(*rows), slice(*keys)) for rows, keys in zip(*both, strict=True)]


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    _refuse(dropout_p, (window_size_left, window_size_right), alibi_slopes)
    found = [
        _forward(q[None, rows], k[None, keys], v[None, keys], softmax_scale, causal)
        for rows, keys in _spans(cu_seqlens_q, cu_seqlens_k)
    ]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1), None, None


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:
    _refuse(dropout_p, (window_size_left, window_size_right), alibi_slopes)
    for rows, keys in _spans(cu_seqlens_q, cu_seqlens_k):
        given = (dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows])
        found = _backward(*given, softmax_lse[None, :, rows], softmax_scale, causal)
        for into, span, x in zip((dq, dk, dv), (rows, keys, keys), found, strict=True):
            into[span] = x[0]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Any,
        dropout_p: float,
        scale: float | None,
        causal: bool,
        window: tuple[int, int],
        slopes: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.given = (*bounds, dropout_p, q.shape[-1] ** -0.5 if scale is None else scale, causal)
        run = _flash_attn_varlen_forward if bounds else _flash_attn_forward
        out, lse, _, _ = run(q, k, v, *ctx.given, *window, 0.0, slopes)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        run = _flash_attn_varlen_backward if len(ctx.given) > 3 else _flash_attn_backward
        run(dout, q, k, v, out, lse, *grads, *ctx.given)
        return *grads, None, None, None, None, None, None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention."""
    out, lse = _Attention.apply(q, k, v, (), dropout_p, softmax_scale, causal, window_size, alibi_slopes)  # type: ignore[no-untyped-call]
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv: Tensor, **kwargs: Any) -> Any:
    """Attention, of queries, keys and values in one tensor."""
    return flash_attn_func(*qkv.unbind(2), **kwargs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention in each of several sequences."""
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = _Attention.apply(q, k, v, bounds, dropout_p, softmax_scale, causal, window_size, alibi_slopes)  # type: ignore[no-untyped-call]
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, **kwargs: Any) -> Any:
    """Attention in each of several sequences, of queries, keys and values in one tensor."""
    return flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **kwargs)
