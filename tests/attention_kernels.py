"""Stand-ins for CUDA's attention operators, in float64 on CPU tensors, with the arguments that torch documents.

They take arguments by position as torch's schemas list them, hold each to what the CUDA kernel needs (strides,
alignment, the shape of the logsumexp), and compute what it would.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["NAMES", "called", "installed"]

NAMES = "flash_attention", "efficient_attention", "cudnn_attention"
called: Counter[str] = Counter()
"""How often each operator was called."""


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    assert scale is not None
    scores = q @ k.mT * scale
    return (
        scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        if causal
        else scores
    )


def _attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    assert q.shape[1] == k.shape[1] == v.shape[1]
    assert {x.stride(-1) for x in (q, k, v)} == {1}
    scores = _scores(q, k, causal, scale)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _differentiated(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with a logsumexp of more keys than these."""
    assert {x.stride(-1) for x in (q, k, v)} == {1}
    assert all(
        x.transpose(1, 2).is_contiguous() for x in (grad, out)
    )  # the kernels do not read all strides of `out`
    assert lse.is_contiguous()
    assert scale is not None
    weights = (_scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
    ds = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, weights.mT @ grad


def _no_more(q: Tensor, k: Tensor, dropout_p: float, max_q: int, max_k: int, *absent: object) -> None:
    assert dropout_p == 0.0
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    assert absent == (None,) * len(absent)


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
           return_debug_mask: bool = False, *, scale: float | None = None) -> Any:  # fmt: skip
    called["flash_attention"] += 1
    assert not return_debug_mask
    assert dropout_p == 0.0
    out, lse = _attended(query, key, value, is_causal, scale)
    state = torch.empty(2, dtype=torch.uint64)
    return out, lse, None, None, query.shape[2], key.shape[2], state, state.clone(), torch.empty(0)


def _flash_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
                    cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
                    philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None) -> Any:  # fmt: skip
    called["flash_attention_backward"] += 1
    _no_more(query, key, dropout_p, max_q, max_k, cum_seq_q, cum_seq_k)
    assert philox_seed.shape == philox_offset.shape == (2,)
    assert logsumexp.shape == query.shape[:3]
    return _differentiated(grad_out, query, key, value, out, logsumexp, is_causal, scale)


def _efficient(query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
               dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None) -> Any:  # fmt: skip
    called["efficient_attention"] += 1
    assert compute_log_sumexp
    assert (attn_bias, dropout_p) == (None, 0.0)
    out, lse = _attended(query, key, value, is_causal, scale)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.nan)
    return out, padded, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _efficient_backward(grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor, out: Tensor,
                        logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor, dropout_p: float,
                        grad_input_mask: list[bool], is_causal: bool = False, *,
                        scale: float | None = None) -> Any:  # fmt: skip
    called["efficient_attention_backward"] += 1
    _no_more(query, key, dropout_p, query.shape[2], key.shape[2], attn_bias)
    assert list(grad_input_mask) == [True, True, True, False]
    assert logsumexp.stride(1) % 32 == 0  # the kernel's alignment
    lse = logsumexp[..., : query.shape[2]].contiguous()
    assert philox_seed.numel() == philox_offset.numel() == 2
    return *_differentiated(grad_out_, query, key, value, out, lse, is_causal, scale), None


def _cudnn(query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
           dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
           scale: float | None = None) -> Any:  # fmt: skip
    called["cudnn_attention"] += 1
    assert compute_log_sumexp
    assert not return_debug_mask
    assert (attn_bias, dropout_p) == (None, 0.0)
    out, lse = _attended(query, key, value, is_causal, scale)
    state = torch.zeros((), dtype=torch.int64)
    return out, lse.unsqueeze(-1), None, None, query.shape[2], key.shape[2], state, state.clone(), None


def _cudnn_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
                    philox_seed: Tensor, philox_offset: Tensor, attn_bias: Tensor, cum_seq_q: Tensor,
                    cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *,
                    scale: float | None = None) -> Any:  # fmt: skip
    called["cudnn_attention_backward"] += 1
    _no_more(query, key, dropout_p, max_q, max_k, attn_bias, cum_seq_q, cum_seq_k)
    assert philox_seed.shape == philox_offset.shape == (2,)
    assert logsumexp.shape == (*query.shape[:3], 1)
    return _differentiated(grad_out, query, key, value, out, logsumexp.squeeze(-1), is_causal, scale)


_STAND_INS = {
    "flash_attention": _flash,
    "flash_attention_backward": _flash_backward,
    "efficient_attention": _efficient,
    "efficient_attention_backward": _efficient_backward,
    "cudnn_attention": _cudnn,
    "cudnn_attention_backward": _cudnn_backward,
}


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Let CPU tensors have the operators in the block."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in _STAND_INS.items():
        library.impl(f"_scaled_dot_product_{name}", function, "CPU")
    called.clear()
    try:
        yield
    finally:
        library._destroy()
