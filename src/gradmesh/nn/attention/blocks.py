"""Attention to some keys after others: the softmax is put together from parts, and the gradients fall apart into them.

With the logsumexp of a row over all its keys, each key's weight can be had from its own score alone. So the parts need
nothing of one another, neither forward (M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax",
2018) nor backward (T. Dao and others, "FlashAttention", 2022).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradmesh._torch import flash_backward, flash_forward, flash_takes
from gradmesh.nn.attention.tiles import Tile

__all__ = ["Gradients", "Seen", "exact", "wide"]

ROWS = 256
"""How many rows of scores are held at once, where torch's fused kernels do not serve."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are taken in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def exact(device: torch.device) -> torch.autocast:
    """Products in the dtype of their operands, also under autocast."""
    return torch.autocast(device.type, enabled=False)


class Seen:
    """The attention of some rows to the keys that were there so far.

    Args:
        q: the rows, (batch, heads, rows, features).
        features: of the values.
        scale: of the scores.
    """

    def __init__(self, q: Tensor, features: int, scale: float) -> None:
        self._q, self._scale, self._features = q, scale, features
        self._had: tuple[Tensor, Tensor] | None = None

    def add(self, of: Sequence[Tile], k: Tensor, v: Tensor) -> None:
        """Attend to more keys."""
        for tile in of:
            q, keys, values = (
                _cut(self._q, tile, tile.rows),
                _cut(k, tile, tile.keys),
                _cut(v, tile, tile.keys),
            )
            out, lse = _attend(q, keys, values, tile.diagonal, self._scale)
            if self._had is None and q.shape == self._q.shape:
                self._had = out.to(wide(out.dtype)), lse
            else:
                self._merge(tile, out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """What was seen, in the rows' dtype, and the logsumexp of each row's scores; -inf where there were none."""
        out, lse = self._so_far()
        return out.to(self._q.dtype), lse

    def _so_far(self) -> tuple[Tensor, Tensor]:
        if self._had is None:
            folds, heads, rows, _ = self._q.shape
            dtype = wide(self._q.dtype)
            # Rows before heads, as the fused kernels have them.
            out = self._q.new_zeros((folds, rows, heads, self._features), dtype=dtype)
            lse = self._q.new_full((folds, rows, heads), -torch.inf, dtype=dtype)
            self._had = out.transpose(1, 2), lse.transpose(1, 2)
        return self._had

    def _merge(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        before, weight = (_cut(x, tile, tile.rows) for x in self._so_far())
        both = torch.logaddexp(weight, lse)
        before.mul_((weight - both).exp_().unsqueeze(-1)).addcmul_(out, (lse - both).exp_().unsqueeze(-1))
        weight.copy_(both)


class Gradients:
    """The gradients of the attention of some rows.

    Args:
        q: the rows.
        out: what they saw.
        lse: its logsumexp.
        grad: the gradient of `out`.
        grad_lse: that of `lse`; None: there is none.
        scale: of the scores.
    """

    def __init__(
        self, q: Tensor, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None, scale: float
    ) -> None:
        self._q, self._out, self._grad, self._scale = q, out, grad.to(q.dtype), scale
        self._grad_lse = grad_lse
        self._lse = lse.masked_fill(lse == -torch.inf, 0)  # of rows that see nothing, and are in no tile
        self._dq: Tensor | None = None

    def add(self, of: Sequence[Tile], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients by some keys and values, in a wide dtype; that by the rows is kept."""
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
        """The gradient by the rows."""
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
        wide_ = wide(q.dtype)
        less = (grad.to(wide_) * out).sum(-1)
        if self._grad_lse is not None:
            less = less - _cut(self._grad_lse, tile, tile.rows)
        dq = torch.empty_like(q, dtype=wide_)
        k, v = k.to(wide_), v.to(wide_)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for row in range(0, q.shape[2], ROWS):
            cut = slice(row, row + ROWS)
            rows, given = q[:, :, cut].to(wide_), grad[:, :, cut].to(wide_)
            weights = (_scores(rows, k, diagonal, scale, row) - lse[:, :, cut, None]).exp_()
            dv += (weights.mT @ given).sum_to_size(dv.shape)
            ds = (given @ v.mT).sub_(less[:, :, cut, None]).mul_(weights).mul_(scale)
            dq[:, :, cut] = ds @ k
            dk += (ds.mT @ rows).sum_to_size(dk.shape)
        return dq, dk, dv


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=wide(like.dtype))


def _added(whole: Tensor | None, part: Tensor, like: Tensor, tile: Tile, span: tuple[int, int]) -> Tensor:
    """The sum with a tile's part; where that is the first and all there is, it is taken as it is."""
    if whole is None and part.shape == like.shape:
        return part.to(wide(like.dtype))
    if whole is None:
        whole = _zeros(like)
    _cut(whole, tile, span).add_(part)
    return whole


def _attend(q: Tensor, k: Tensor, v: Tensor, diagonal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to some keys, each row to one at least, and the logsumexp."""
    if flash_takes(q, k, v):
        heads = q.shape[1]
        return flash_forward(q, k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1), diagonal, scale)
    wide_ = wide(q.dtype)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=wide_)
    lse = q.new_empty(q.shape[:-1], dtype=wide_)
    k, v = k.to(wide_), v.to(wide_)
    for row in range(0, q.shape[2], ROWS):
        cut = slice(row, row + ROWS)
        scores = _scores(q[:, :, cut].to(wide_), k, diagonal, scale, row)
        lse[:, :, cut] = whole = scores.logsumexp(-1)
        out[:, :, cut] = scores.sub_(whole.unsqueeze(-1)).exp_() @ v
    return out, lse


def _scores(q: Tensor, k: Tensor, diagonal: bool, scale: float, first: int) -> Tensor:
    """Scores of rows of which the first is row `first`."""
    scores = (q @ k.mT).mul_(scale)
    if diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(first + 1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def _cut(x: Tensor, tile: Tile, span: tuple[int, int]) -> Tensor:
    """A tile's part along the sequence."""
    x = x[:, :, span[0] : span[1]]
    return x if tile.batch is None else x[tile.batch[0] : tile.batch[1]]
