"""Blockwise attention: partial softmax results are merged by their logsumexp; backward is a sum over blocks.

Sources: M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018 (forward); T. Dao and others,
"FlashAttention", 2022 (backward).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradmesh._torch import flash_backward, flash_forward, flash_takes
from gradmesh.nn.attention.tiles import Tile

__all__ = ["BlockwiseAttention", "BlockwiseGradients", "accumulator", "exact"]

ROWS = 256
"""Number of rows of scores in memory at once, where torch's fused kernels do not apply."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are accumulated."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def exact(device: torch.device) -> torch.autocast:
    """Disable autocast."""
    return torch.autocast(device.type, enabled=False)


class BlockwiseAttention:
    """Accumulates attention over blocks of keys.

    Args:
        q: (batch, heads, rows, features).
        features: of the values.
        scale: of the scores.
    """

    def __init__(self, q: Tensor, features: int, scale: float) -> None:
        self._q, self._scale, self._features = q, scale, features
        self._sum: tuple[Tensor, Tensor] | None = None

    def add(self, of: Sequence[Tile], k: Tensor, v: Tensor) -> None:
        """Attend to another block of keys."""
        for tile in of:
            q, keys, values = (
                _cut(self._q, tile, tile.rows),
                _cut(k, tile, tile.keys),
                _cut(v, tile, tile.keys),
            )
            out, lse = _attend(q, keys, values, tile.diagonal, self._scale)
            if self._sum is None and q.shape == self._q.shape:
                self._sum = out.to(accumulator(out.dtype)), lse
            else:
                self._merge(tile, out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output in the dtype of `q`, and each row's logsumexp; -inf for rows without keys."""
        out, lse = self._so_far()
        return out.to(self._q.dtype), lse

    def _so_far(self) -> tuple[Tensor, Tensor]:
        if self._sum is None:
            folds, heads, rows, _ = self._q.shape
            dtype = accumulator(self._q.dtype)
            # Memory layout of the fused kernels: rows before heads.
            out = self._q.new_zeros((folds, rows, heads, self._features), dtype=dtype)
            lse = self._q.new_full((folds, rows, heads), -torch.inf, dtype=dtype)
            self._sum = out.transpose(1, 2), lse.transpose(1, 2)
        return self._sum

    def _merge(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        before, weight = (_cut(x, tile, tile.rows) for x in self._so_far())
        both = torch.logaddexp(weight, lse)
        before.mul_((weight - both).exp_().unsqueeze(-1)).addcmul_(out, (lse - both).exp_().unsqueeze(-1))
        weight.copy_(both)


class BlockwiseGradients:
    """Accumulates the gradients of attention over blocks of keys.

    Args:
        q: the queries.
        out: the attention output.
        lse: its logsumexp.
        grad: the gradient of `out`.
        grad_lse: the gradient of `lse`, or None.
        scale: of the scores.
    """

    def __init__(
        self, q: Tensor, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None, scale: float
    ) -> None:
        self._q, self._out, self._grad, self._scale = q, out, grad.to(q.dtype), scale
        self._grad_lse = grad_lse
        self._lse = lse.masked_fill(lse == -torch.inf, 0)  # rows without keys, which are in no tile
        self._dq: Tensor | None = None

    def add(self, of: Sequence[Tile], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients with respect to a block's keys and values, in the accumulator dtype; dq is accumulated."""
        dk: Tensor | None = None
        dv: Tensor | None = None
        for tile in of:
            keys, values = _cut(k, tile, tile.keys), _cut(v, tile, tile.keys)
            dq_, dk_, dv_ = self._of(tile, keys, values)
            self._dq = _added(self._dq, dq_, self._q, tile, tile.rows)
            del dq_
            dk, dv = _added(dk, dk_, k, tile, tile.keys), _added(dv, dv_, v, tile, tile.keys)
        return _zeros(k) if dk is None else dk, _zeros(v) if dv is None else dv

    def dq(self) -> Tensor:
        """The gradient with respect to `q`."""
        return (_zeros(self._q) if self._dq is None else self._dq).to(self._q.dtype)

    def _of(self, tile: Tile, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, out, grad, lse = (_cut(x, tile, tile.rows) for x in (self._q, self._out, self._grad, self._lse))
        diagonal, scale = tile.diagonal, self._scale
        heads = q.shape[1]
        if self._grad_lse is None and flash_takes(q, k, v):
            keys, values = (x.expand(-1, heads, -1, -1) for x in (k, v))
            dq, dk, dv = flash_backward(grad, q, keys, values, out, lse, diagonal, scale)
            if k.shape[1] != heads:
                dk, dv = dk.sum(1, keepdim=True), dv.sum(1, keepdim=True)
            return dq, dk, dv
        wide = accumulator(q.dtype)
        less = (grad.to(wide) * out).sum(-1)
        if self._grad_lse is not None:
            less = less - _cut(self._grad_lse, tile, tile.rows)
        dq = torch.empty_like(q, dtype=wide)
        k, v = k.to(wide), v.to(wide)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for row in range(0, q.shape[2], ROWS):
            cut = slice(row, row + ROWS)
            rows, dout = q[:, :, cut].to(wide), grad[:, :, cut].to(wide)
            weights = (_scores(rows, k, diagonal, scale, row) - lse[:, :, cut, None]).exp_()
            dv += (weights.mT @ dout).sum_to_size(dv.shape)
            ds = (dout @ v.mT).sub_(less[:, :, cut, None]).mul_(weights).mul_(scale)
            dq[:, :, cut] = ds @ k
            dk += (ds.mT @ rows).sum_to_size(dk.shape)
        return dq, dk, dv


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=accumulator(like.dtype))


def _added(whole: Tensor | None, part: Tensor, like: Tensor, tile: Tile, span: tuple[int, int]) -> Tensor:
    """Add a tile's gradient to the sum; a first one that covers everything becomes the sum without a copy."""
    if whole is None and part.shape == like.shape:
        return part.to(accumulator(like.dtype))
    if whole is None:
        whole = _zeros(like)
    _cut(whole, tile, span).add_(part)
    return whole


def _attend(q: Tensor, k: Tensor, v: Tensor, diagonal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to a block in which each row sees at least one key, and the logsumexp."""
    if flash_takes(q, k, v):
        heads = q.shape[1]
        return flash_forward(q, k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1), diagonal, scale)
    wide = accumulator(q.dtype)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=wide)
    lse = q.new_empty(q.shape[:-1], dtype=wide)
    k, v = k.to(wide), v.to(wide)
    for row in range(0, q.shape[2], ROWS):
        cut = slice(row, row + ROWS)
        scores = _scores(q[:, :, cut].to(wide), k, diagonal, scale, row)
        lse[:, :, cut] = whole = scores.logsumexp(-1)
        out[:, :, cut] = scores.sub_(whole.unsqueeze(-1)).exp_() @ v
    return out, lse


def _scores(q: Tensor, k: Tensor, diagonal: bool, scale: float, first: int) -> Tensor:
    """Scores of a slice of rows that starts at row `first`."""
    scores = (q @ k.mT).mul_(scale)
    if diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(first + 1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def _cut(x: Tensor, tile: Tile, span: tuple[int, int]) -> Tensor:
    """A tile's slice of a tensor."""
    x = x[:, :, span[0] : span[1]]
    return x if tile.batch is None else x[tile.batch[0] : tile.batch[1]]
