"""Context parallelism: attention over a sequence that is sharded over the ranks, by a ring or by heads (Ulysses).

Each rank computes its queries' attention to one block of keys after another, in tiles: unmasked rectangles, and
diagonal squares with a causal mask. A rank holds some pieces of the sequence, in rising order, and the rows of a piece
attend to all keys of another rank's piece or to none: it precedes them in the same document, or not. Partial softmax
results are merged by their logsumexp; backward is a sum over blocks.

One autograd node saves only this rank's shard; backward sends the blocks around again. `composed_attention` (forward
mode, vmap, compiled programs) and `composed_gradients` (double backward) consist of differentiable operators and have
all scores of a hop in memory at once. Masked scores are computed and get weight 0, so that every rank uses every block
and all ranks run the same backward.

Sources: M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018 (forward); T. Dao and others,
"FlashAttention", 2022 (backward); S. A. Jacobs and others, "DeepSpeed Ulysses: system optimizations for enabling
training of extreme long sequence transformer models", 2023.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from gradmesh._torch import fused_attention, is_fake, is_legacy_batched, tracing, transforms_active
from gradmesh.autograd.pending import AsyncCollective, runs_async, started
from gradmesh.autograd.rule import (
    DETACHED_TOKEN,
    apply,
    apply_ordered,
    apply_unordered,
    grad_token,
    token_after,
)
from gradmesh.errors import DTypeError, ShapeError
from gradmesh.nn.inputs import check_own_size
from gradmesh.nn.sequence import Order, positions_of, sizes_of, spans
from gradmesh.ops.all_to_all import AllToAll
from gradmesh.ops.permute import Shift
from gradmesh.ops.sizes import Sizes, balanced, intervals
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.runtime.state import must_decompose
from gradmesh.transport import compiling
from gradmesh.transport.call_checks import BACKWARD, CAN_BACKWARD, NEEDS_BACKWARD, ZERO_GRAD, CallRecord
from gradmesh.transport.run import apply as run_op
from gradmesh.transport.run import constants
from gradmesh.verbs.call import Call, SizesLike, integer

__all__ = ["ring_attention", "ulysses_attention"]


Send = Callable[[int, Sequence[Tensor]], list[Callable[[], Tensor]]]
"""Starts to send tensors to the next rank, after a number of hops; returns functions that wait for those received."""


def travel(
    ranks: int,
    block: Sequence[Tensor],
    work: Callable[[int, Sequence[Tensor]], Iterable[Tensor]],
    combine: Callable[[Tensor, Tensor], Tensor],
    send: Send,
    send_sums: Send,
) -> list[Tensor]:
    """Send each rank's block around the ring, and return the sums over all ranks that belong to this rank's block.

    `work` computes this rank's terms of the sums of a block, from the number of hops and the block; `combine` adds
    them, its second argument, to the sums of the ranks before it. Each transfer starts before the work that overlaps.
    """
    coming: list[Callable[[], Tensor]] = []
    for hop in range(ranks):
        following = send(hop, block) if hop < ranks - 1 else []
        sums = list(work(hop, block))
        if coming:
            sums = [combine(wait(), term) for wait, term in zip(coming, sums, strict=True)]
        if ranks == 1:
            return sums
        coming = send_sums(hop, sums)
        del sums  # free the memory before the next block arrives
        block = [wait() for wait in following]
    return [wait() for wait in coming]


class Piece(NamedTuple):
    """Consecutive positions of the sequence, `start <= position < stop`."""

    start: int
    stop: int


class Tile(NamedTuple):
    """A rectangle of scores to compute. Intervals are half-open."""

    batch: tuple[int, int] | None  # interval of the batch; None: all
    rows: tuple[int, int]  # interval of the local rows
    keys: tuple[int, int]  # interval of the block's keys
    # True for a causal mask within the tile; rows and keys are then the same positions
    diagonal: bool = False


@dataclass(frozen=True)
class Layout:
    """The distribution of a sequence over the ranks, and its mask."""

    rows: tuple[tuple[Piece, ...], ...]  # each rank's pieces of the queries
    # each rank's pieces of the keys; differs from `rows` in cross attention, which has no mask
    keys: tuple[tuple[Piece, ...], ...]
    causal: bool  # True if a position attends only to positions up to itself
    # of the documents in the sequence, one tuple for each sequence of the batch, or one for all
    lengths: tuple[tuple[int, ...], ...] | None
    fold: int = 1  # number of groups of heads that are folded into the batch


class _Part(NamedTuple):
    """The positions of one document on a rank, and the local index of the first."""

    document: int
    start: int
    stop: int
    first: int

    @property
    def local(self) -> tuple[int, int]:
        return self.first, self.first + self.stop - self.start


def tiles(layout: Layout, rank: int, source: int) -> tuple[Tile, ...]:
    """The tiles of this rank's rows with the keys of rank `source`.

    >>> halves = (Piece(0, 2), Piece(6, 8)), (Piece(2, 4), Piece(4, 6))
    >>> tiles(Layout(halves, halves, True, None), 0, 1)  # the second half attends to all keys
    (Tile(batch=None, rows=(2, 4), keys=(0, 4), diagonal=False),)
    """
    return (_tiles if compiling() else _cached_tiles)(layout, rank, source)


def _tiles(layout: Layout, rank: int, source: int) -> tuple[Tile, ...]:
    mine, theirs = layout.rows[rank], layout.keys[source]
    if not layout.causal and layout.lengths is None:
        rows, keys = (sum(stop - start for start, stop in held) for held in (mine, theirs))
        return (Tile(None, (0, rows), (0, keys)),) if rows and keys else ()
    found: list[Tile] = []
    for batch, lengths in enumerate(layout.lengths or (None,)):
        separate = layout.lengths is not None and len(layout.lengths) > 1
        of = (batch * layout.fold, (batch + 1) * layout.fold) if separate else None
        if layout.causal and rank == source:
            spans: dict[int, tuple[int, int]] = {}
            for part in _parts(mine, lengths):
                first = spans.get(part.document, part.local)[0]
                spans[part.document] = first, part.local[1]
            found += (Tile(of, span, span, diagonal=True) for span in spans.values())
        else:
            found += _rectangles(of, _parts(mine, lengths), _parts(theirs, lengths), causal=layout.causal)
    return tuple(found)


_cached_tiles = lru_cache(maxsize=256)(_tiles)


def _parts(pieces: Sequence[Piece], lengths: Sequence[int] | None) -> list[_Part]:
    """The pieces, split at document boundaries, without the padding after the last document."""
    documents = intervals((pieces[-1].stop,) if lengths is None else lengths)
    found: list[_Part] = []
    first = 0
    for start, stop in pieces:
        for document, (begin, end) in enumerate(documents):
            low, high = max(start, begin), min(stop, end)
            if low < high:
                found.append(_Part(document, low, high, first + low - start))
        first += stop - start
    return found


def _rectangles(
    batch: tuple[int, int] | None, mine: Sequence[_Part], theirs: Sequence[_Part], *, causal: bool
) -> list[Tile]:
    found: list[Tile] = []
    for part in mine:
        seen = [
            other.local
            for other in theirs
            if other.document == part.document and (not causal or other.stop <= part.start)
        ]
        if not seen:
            continue
        keys, rows = (seen[0][0], seen[-1][1]), part.local
        if found and found[-1].keys == keys and found[-1].rows[1] == rows[0]:
            rows = found.pop().rows[0], rows[1]
        found.append(Tile(batch, rows, keys))
    return found


def mask(of: Sequence[Tile], batch: int, rows: int, keys: int, device: torch.device) -> Tensor:
    """The tiles as a mask, (batch or 1, 1, rows, keys): True where a score is used.

    >>> mask([Tile(None, (0, 2), (0, 2), True)], 1, 2, 2, torch.device("cpu")).int().tolist()
    [[[[1, 0], [1, 1]]]]
    """
    several = any(tile.batch is not None for tile in of)
    made = torch.zeros(batch if several else 1, 1, rows, keys, dtype=torch.bool, device=device)
    for tile in of:
        (row, row_end), (key, key_end) = tile.rows, tile.keys
        block = torch.ones((row_end - row, key_end - key), dtype=torch.bool, device=device)
        where = slice(None) if tile.batch is None else slice(*tile.batch)
        made[where, :, row:row_end, key:key_end] = block.tril() if tile.diagonal else block
    return made


ROWS = 256
"""Number of rows of scores in memory at once, where torch's fused kernels do not apply."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are accumulated."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def exact(device: torch.device) -> torch.autocast:
    """Disable autocast."""
    return torch.autocast(device.type, enabled=False)


class BlockwiseAttention:
    """Accumulates attention over blocks of keys; `q` has shape (batch, heads, rows, features)."""

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
    """Accumulates the gradients of attention over blocks of keys."""

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
        if self._grad_lse is None and (kernel := fused_attention(q, k, v, diagonal)):
            return kernel.backward(grad, q, k, v, out, lse, diagonal=diagonal, scale=scale)
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
    whole = _zeros(like) if whole is None else whole
    _cut(whole, tile, span).add_(part)
    return whole


def _attend(q: Tensor, k: Tensor, v: Tensor, diagonal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to a block in which each row sees at least one key, and the logsumexp."""
    if kernel := fused_attention(q, k, v, diagonal):
        return kernel.forward(q, k, v, diagonal, scale)
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


Work = Callable[[Sequence[Tile], Tensor, Tensor], Iterable[Tensor]]
"""Uses a block: the tiles to compute, the keys and the values. Returns this rank's terms of the block's sums."""


@dataclass(frozen=True)
class Ring:
    """One call of ring attention on one rank."""

    axis: Axis
    layout: Layout  # the distribution of the sequence over the ranks
    sizes: tuple[int, ...]  # each rank's number of keys
    features: tuple[int, int]  # of a key and of a value
    scale: float  # of the scores
    signature: str  # the call as text, which the ranks compare

    def op(self, hop: int) -> Shift:
        """The collective that sends a block on after `hop` hops."""
        return self._op(hop) if compiling() else self._ops[hop % len(self.sizes)]

    def _op(self, hop: int) -> Shift:
        plain, sizes = Shift(self.axis, operand_desc=self.signature), self.sizes
        if all(size == sizes[0] for size in sizes):
            return plain
        hop %= len(sizes)
        return plain.along(2, Sizes(sizes[len(sizes) - hop :] + sizes[: len(sizes) - hop]))

    @cached_property
    def _ops(self) -> tuple[Shift, ...]:
        return tuple(self._op(hop) for hop in range(len(self.sizes)))

    def tiles(self, hop: int) -> tuple[Tile, ...]:
        """The tiles of scores to compute with the block that this rank has after `hop` hops."""
        return tiles(self.layout, self.axis.rank, (self.axis.rank - hop) % self.axis.size)

    def start(self, hop: int, block: Tensor, call: CallRecord) -> AsyncCollective:
        """Start sending a block on; synchronous if the axis has no communication thread, and the block no stream."""
        op = self.op(hop)
        if runs_async(op, block):
            return started(op, block, call)
        return AsyncCollective(op, None, call, held=run_op(op, block, call))

    def travel(self, k: Tensor, v: Tensor, call: CallRecord, work: Work) -> list[Tensor]:
        """Call `work` with the local keys and values, then with those of the preceding ranks.

        Returns the sum over the ranks of what it returned for this rank's keys and values, if it returned tensors.
        """
        calls = chain((call,), iter(call.sibling, None))

        def at(hop: int, block: Sequence[Tensor]) -> Iterable[Tensor]:
            keys, values = block[0].split(self.features, -1) if hop else (k, v)
            return work(self.tiles(hop), keys, values)

        def send(hop: int, tensors: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
            return [self.start(hop, x, next(calls)).result for x in tensors]

        size = self.axis.size
        block = [torch.cat((k, v), -1)] if size > 1 else []
        return travel(size, block, at, lambda came, local: local.add_(came), send, send)


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, call: CallRecord) -> tuple[Tensor, Tensor]:
    """The attention of this rank's queries to the keys of all ranks, and each row's logsumexp."""
    attention = BlockwiseAttention(q, ring.features[1], ring.scale)

    def work(of: Sequence[Tile], keys: Tensor, values: Tensor) -> Iterable[Tensor]:
        attention.add(of, keys, values)
        return ()

    ring.travel(k, v, call, work)
    return attention.result()


def backward(
    ring: Ring, saved: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None, call: CallRecord
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the local q, k and v, from these, the output and its logsumexp (`saved`).

    A block's gradients follow it around the ring, back to its rank.
    """
    q, k, v, out, lse = saved
    gradients = BlockwiseGradients(q, out, lse, grad, grad_lse, ring.scale)
    several = ring.axis.size > 1

    def work(of: Sequence[Tile], keys: Tensor, values: Tensor) -> Iterable[Tensor]:
        parts = gradients.add(of, keys, values)
        return (torch.cat(parts, -1),) if several else parts

    sums = ring.travel(k, v, call, work)
    dk, dv = (x.clone() for x in sums[0].split(ring.features, -1)) if several else sums
    return gradients.dq(), dk.to(k.dtype), dv.to(v.dtype)


Run = Callable[[Shift, Tensor], Tensor]
"""Runs a collective, differentiably."""


def composed_attention(ring: Ring, q: Tensor, k: Tensor, v: Tensor, run: Run) -> Tensor:
    """The attention output of this rank's queries; `run` sends a block to the next rank."""
    rows = q.to(accumulator(q.dtype)) * ring.scale
    top = rows.new_full((1, 1, 1, 1), -torch.inf)
    weight: Tensor | float = 0.0
    out: Tensor | float = 0.0

    def work(hop: int, block: Sequence[Tensor]) -> Iterable[Tensor]:
        nonlocal top, weight, out
        keys, values = block[0].to(rows.dtype).split(ring.features, -1)
        scores = (rows @ keys.mT).masked_fill(~_mask(ring, hop, q, keys), -torch.inf)
        # The maximum cancels out of the result, so it is detached.
        before = top
        if keys.shape[2]:
            top = torch.maximum(before, scores.detach().amax(-1, keepdim=True))
        finite = top.masked_fill(top == -torch.inf, 0)
        less, weights = (before - finite).exp(), (scores - finite).exp()
        weight = weights.sum(-1, keepdim=True) + less * weight
        out = weights @ values + less * out
        return ()

    send = _sending(ring, run)
    travel(ring.axis.size, [torch.cat((k, v), -1)], work, torch.add, send, send)
    return (out / (weight + (weight == 0))).to(q.dtype)  # type: ignore[union-attr]  # there is at least one hop


def composed_gradients(
    ring: Ring, saved: Sequence[Tensor], grad: Tensor, grad_lse: Tensor | None, run: Run
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` by differentiable operators; `run` sends a block to the next rank."""
    q, k, v, out, lse = saved
    dtype = accumulator(q.dtype)
    rows, dout = q.to(dtype), grad.to(dtype)
    less = (dout * out).sum(-1, keepdim=True)
    if grad_lse is not None:
        less = less - grad_lse.unsqueeze(-1)
    finite = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
    dq = torch.zeros_like(rows)

    def work(hop: int, block: Sequence[Tensor]) -> Iterable[Tensor]:
        nonlocal dq
        keys, values = block[0].to(dtype).split(ring.features, -1)
        scores = (rows @ keys.mT * ring.scale).masked_fill(~_mask(ring, hop, q, keys), -torch.inf)
        weights = (scores - finite).exp()
        ds = weights * (dout @ values.mT - less) * ring.scale
        dq = dq + ds @ keys
        dk, dv = (ds.mT @ rows).sum_to_size(keys.shape), (weights.mT @ dout).sum_to_size(values.shape)
        return (torch.cat((dk, dv), -1),)

    send = _sending(ring, run)
    (back,) = travel(ring.axis.size, [torch.cat((k, v), -1)], work, torch.add, send, send)
    dk, dv = back.split(ring.features, -1)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _sending(ring: Ring, run: Run) -> Send:
    def send(hop: int, tensors: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
        received = [run(ring.op(hop), x) for x in tensors]
        return [lambda x=x: x for x in received]  # type: ignore[misc]

    return send


def _mask(ring: Ring, hop: int, q: Tensor, keys: Tensor) -> Tensor:
    return mask(ring.tiles(hop), q.shape[0], q.shape[2], keys.shape[2], q.device)


def attend(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention output of this rank's queries; inside `ordered()`, as the next ordered op."""
    traced = compiling() or tracing() or is_fake(q)
    if traced or transforms_active() or must_decompose() or any(is_legacy_batched(x) for x in (q, k, v)):
        return composed_attention(ring, q, k, v, apply)
    recording = torch.is_grad_enabled()
    requires = recording and (q.requires_grad or k.requires_grad or v.requires_grad)

    def run(token: Tensor | None) -> tuple[Tensor, Tensor]:
        needed = requires or token is not None
        call = CallRecord(flags=NEEDS_BACKWARD * needed | CAN_BACKWARD * recording, ordered=token is not None)
        with torch.no_grad():
            out, lse = forward(ring, q, k, v, call)
        if token is None:
            if not requires and not call.others_need_backward:
                return out, DETACHED_TOKEN
            token = DETACHED_TOKEN if requires else grad_token()
        y, _, token = _Node.apply((ring, call, out, lse), q, k, v, token)  # type: ignore[no-untyped-call]
        return y, token

    if ring.axis.size == 1:
        return run(None)[0]
    y: Tensor = apply(ring.op(0), k, lambda _, __: run(None)[0], lambda chain, op, _: chain.node(op, k, run))
    return y


class _Node(torch.autograd.Function):
    """Returns the output, the logsumexp (which double backward needs) and an ordering token.

    It takes them in a tuple: whether a result needs a node is only known after the exchange.
    """

    @staticmethod
    def forward(ctx: Any, result: Any, q: Tensor, k: Tensor, v: Tensor, token: Tensor) -> tuple[Tensor, ...]:
        ctx.ring, ctx.call, out, lse = result
        following = token_after(token)
        ctx.save_for_backward(token if ctx.call.ordered else following, q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse, following

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, following: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        token, *saved = ctx.saved_tensors  # read once: activation checkpointing allows one read
        ring, origin, nothing = ctx.ring, ctx.call, grad is None and grad_lse is None
        grad = torch.zeros_like(saved[3]) if grad is None else grad
        if following is None and origin.ordered:
            following = token.clone()
        call = CallRecord(BACKWARD, origin, ZERO_GRAD * nothing)
        with exact(grad.device):
            if torch.is_grad_enabled() or is_legacy_batched(grad) or transforms_active():
                calls = _OrderedCalls(call, following if origin.ordered else token)
                grads = composed_gradients(ring, saved, grad, grad_lse, calls.run)
                return None, *grads, calls.token if origin.ordered else None
            grads = backward(ring, saved, grad, grad_lse, call)
        # If no rank has a gradient, return None: zeros times an infinite derivative would be NaN.
        if nothing and not origin.ordered and (ring.axis.size == 1 or call.all_zero):
            return None, None, None, None, None
        return None, *grads, following


class _OrderedCalls:
    """The calls of a differentiable backward: ordered ops, or only the first one depends on the forward call."""

    def __init__(self, call: CallRecord, token: Tensor | None) -> None:
        self._call, self._linked = call, call.origin is not None and call.origin.ordered
        self.token = token

    def run(self, op: Shift, x: Tensor) -> Tensor:
        call, self._call = self._call, self._call.sibling()
        if self._linked:
            y, self.token = apply_ordered(op, x, self.token, call.role, call.origin)  # type: ignore[arg-type]  # not None
            return y
        token, self.token = self.token, None
        return apply_unordered(op, x, call, token if torch.is_grad_enabled() else None)


Lengths = Sequence[int] | Sequence[Sequence[int]] | Tensor | None

_ORDERS: dict[str, Order] = {"plain": "plain", "zigzag": "zigzag"}


@dataclass(frozen=True)
class AttentionInputs:
    """Checked arguments of a distributed attention call."""

    axis: Axis
    rows: tuple[int, ...]  # each rank's number of queries
    keys: tuple[int, ...]  # each rank's number of keys; differs from `rows` in cross attention only
    order: Order  # how the sequence is sharded
    causal: bool  # True if a position attends only to positions up to itself
    # of documents; one tuple for each sequence of the batch, or one for all
    lengths: tuple[tuple[int, ...], ...] | None
    scale: float  # of the scores
    signature: str  # all of it as text, which the ranks compare

    @classmethod
    def of(
        cls,
        verb: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        axis: AxisLike,
        causal: bool,
        order: str,
        sizes: SizesLike,
        lengths: Lengths,
        scale: float | None,
        attn_mask: object,
        dropout_p: object,
        query_sizes: SizesLike = None,
    ) -> AttentionInputs:
        """Check the arguments of a verb.

        Raises:
            ArgumentError, ShapeError, DTypeError: on this rank; the other ranks raise `MismatchError`.
        """
        call = Call(verb, k, axis, async_op=True)
        for x in (q, v):
            Call(verb, x, axis, async_op=True)
        _check_tensors(call, q, k, v)
        _refuse_unsupported(call, attn_mask, dropout_p)
        causal = call.flag(causal, "causal")
        chosen = call.choose("order", order, _ORDERS)
        keys = call.explicit_sizes(sizes, 2).explicit
        check_own_size(call, keys, k.shape[2], "keys")
        if chosen == "zigzag" and keys != sizes_of(chosen, sum(keys), len(keys)):
            call.fail(
                "the ranks' shards do not have the sizes of a zigzag sequence",
                expected=f"sizes {sizes_of(chosen, sum(keys), len(keys))}",
                got=f"sizes {keys}",
                remedy='shard the sequence with gm.nn.sequence.shard(x, order="zigzag")',
                kind=ShapeError,
            )
        rows = keys if q.shape[2] == k.shape[2] else tuple(q.shape[2] for _ in keys)
        if query_sizes is not None:
            rows = Call(verb, q, axis, async_op=True).explicit_sizes(query_sizes, 2).explicit
        check_own_size(call, rows, q.shape[2], "queries", "query_sizes")
        documents = _documents(call, lengths, sum(keys), q.shape[0])
        if rows != keys and (causal or documents is not None):
            call.fail(
                "causal= and lengths= need as many queries as keys",
                expected="queries and keys of the same sequence (self-attention)",
                got=f"{q.shape[2]} queries and {k.shape[2]} keys",
                remedy="omit causal and lengths for cross attention",
                kind=ShapeError,
            )
        factor = q.shape[3] ** -0.5 if scale is None else scale
        if not isinstance(factor, (float, int)) or isinstance(factor, bool):
            call.fail(
                "scale must be a float or None",
                expected="e.g. scale=0.125, or None for 1 / sqrt(features)",
                got=f"scale={scale!r}",
                remedy="pass a Python number; to learn the scale, multiply q by a parameter and pass scale=1.0",
            )
        text = f"{causal=}, order={chosen!r}, scale={float(factor):.9g}, lengths={_shown(documents)}"
        if all(size == keys[0] for size in keys):
            text += ", dim=2, sizes=equal"
        signature = f"{verb}({text}; q of {q.shape[1]} heads, k of {k.shape[3]} features)"
        return cls(call.axis, rows, keys, chosen, causal, documents, float(factor), signature)

    def layout(self, fold: int) -> Layout:
        """The distribution of the sequence over the ranks, with `fold` groups of heads folded into the batch."""
        keys = _pieces(self.order, self.keys)
        rows = keys if self.rows == self.keys else _pieces("plain", self.rows)
        return Layout(rows, keys, self.causal, self.lengths, fold)


def _pieces(order: Order, sizes: tuple[int, ...]) -> tuple[tuple[Piece, ...], ...]:
    return tuple(tuple(Piece(*span) for span in rank) for rank in spans(order, sizes))


def _check_tensors(call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if {x.dim() for x in (q, k, v)} != {4}:
        call.fail(
            "q, k and v are not tensors of 4 dimensions",
            expected="shapes (batch, heads, local sequence, features)",
            got=shapes,
            remedy="add the missing dimensions, e.g. x.unsqueeze(0) for a batch of one",
            kind=ShapeError,
        )
    fits = k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or not (k.shape[1] and k.shape[3]) or q.shape[1] % k.shape[1]:
        call.fail(
            "the shapes of q, k and v do not match",
            expected="equal batch sizes; k and v of equal heads and length; q and k of equal features; the number of "
            "heads of q a multiple of that of k",
            got=shapes,
            remedy="make the shapes match, e.g. q (2, 8, L, 64) with k and v (2, 8, L, 64), or (2, 4, L, 64) for "
            "grouped queries",
            kind=ShapeError,
        )
    same = len({(x.dtype, x.device) for x in (q, k, v)}) == 1
    if not same or not q.is_floating_point() or q.dtype.itemsize < 2:
        call.fail(
            "q, k and v do not have one supported dtype and device",
            expected="the same floating-point dtype of at least 16 bits, and the same device",
            got=", ".join(
                f"{name} {x.dtype} on {x.device}" for name, x in zip("qkv", (q, k, v), strict=True)
            ),
            remedy="convert them, e.g. k, v = k.to(q), v.to(q)",
            kind=DTypeError,
        )


def _refuse_unsupported(call: Call, attn_mask: object, dropout_p: object) -> None:
    if attn_mask is not None:
        call.fail(
            "attn_mask is not supported (it would be as large as the scores)",
            expected="attn_mask=None, with causal=True, or lengths= for documents and padding",
            got=f"attn_mask={type(attn_mask).__name__}",
            remedy="use gm.nn.ulysses_attention(..., attention=f), where f applies the mask of the full sequence",
        )
    if dropout_p:
        call.fail(
            "dropout of attention weights is not supported",
            expected="dropout_p=0.0",
            got=f"dropout_p={dropout_p!r}",
            remedy="apply dropout to the output, or use gm.nn.ulysses_attention(..., attention=f), where f applies it",
        )


def _documents(call: Call, lengths: Lengths, total: int, batch: int) -> tuple[tuple[int, ...], ...] | None:
    """The documents' lengths, one tuple for each sequence of the batch, or one for all."""
    if lengths is None:
        return None
    plain: Any = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    nested = _is_list(plain) and len(plain) > 0 and all(_is_list(one) for one in plain)
    listed = plain if nested else [plain]
    found = [[integer(n) for n in one] if _is_list(one) else [None] for one in listed]
    whole = tuple(tuple(n for n in one if n is not None and n >= 0) for one in found)
    right = [len(w) for w in whole] == [len(one) for one in found]
    right = right and (len(whole) == batch if nested else sum(whole[0]) == total)
    if not right or any(sum(one) > total for one in whole):
        call.fail(
            "lengths do not match the sequence",
            expected=f"ints >= 0 that add up to {total}, the length over all ranks; or {batch} lists of ints (one for "
            f"each sequence of the batch) that add up to at most {total}",
            got=f"lengths={lengths!r}",
            remedy="pass the lengths of all ranks' documents, the same on every rank, e.g. lengths=cu_seqlens.diff()",
            kind=ShapeError,
        )
    return whole


def _is_list(x: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(x, Sequence) and not isinstance(x, str)


def _shown(documents: tuple[tuple[int, ...], ...] | None) -> str:
    text = str(documents)
    if len(text) <= 60:
        return text
    return f"{text[:40]}... ({hashlib.blake2b(text.encode(), digest_size=6).hexdigest()})"


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: AxisLike = None,
    *,
    causal: bool = False,
    order: Order = "plain",
    sizes: SizesLike = None,
    lengths: Lengths = None,
    scale: float | None = None,
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention over a sequence that is sharded over the ranks; keys and values travel around a ring.

    ::

        V -> V    softmax(q_r K^T / sqrt(features)) V, where K, V are those of all ranks
                  backward: keys and values travel again, followed by their gradients

    It is exact: the value and every derivative are those of `torch.nn.functional.scaled_dot_product_attention` on the
    full sequence. The next block of keys and values is sent while the current one is used, and a rank saves only its
    local q, k and v for backward. Blocks that are fully masked by causality or document boundaries are skipped.

    Args:
        q: this rank's queries, (batch, heads, local sequence, features).
        k: this rank's keys; may have fewer heads than `q` (grouped queries).
        v: this rank's values; may have another number of features than `k`.
        axis: the ranks, as in every verb.
        causal: True if a position attends only to positions up to itself.
        order: how the sequence is sharded; see `gradmesh.nn.sequence`. With `causal`, "zigzag" gives all ranks the same
            work.
        sizes: each rank's number of keys, which may be 0, e.g. `sizes=(4, 3)`; None: the same on every rank; "auto":
            exchanged.
        lengths: of the documents in the sequence, over all ranks, the same on every rank; positions attend only to
            their own document. One list for all, or one list for each sequence of the batch; the latter may add up to
            less than the sequence: the rest is padding, with output 0.
        scale: of the scores; defaults to 1 / sqrt(features).
        attn_mask: not supported; see `gradmesh.nn.ulysses_attention`.
        dropout_p: not supported; see `gradmesh.nn.ulysses_attention`.

    Returns:
        The attention output of this rank's queries, (batch, heads, local sequence, features of v).

    Raises:
        ArgumentError, ShapeError, DTypeError: invalid arguments on this rank.
        MismatchError: the ranks' arguments differ, or another rank raised.

    Example:
        >>> def on_each_rank():
        ...     x = torch.arange(8.0).view(1, 1, 8, 1) / 8  # the whole sequence
        ...     q = gm.nn.sequence.shard(x, order="zigzag")
        ...     seen = gm.nn.ring_attention(q, q, q, causal=True, order="zigzag")
        ...     whole = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        ...     return torch.allclose(gm.nn.sequence.unshard(seen, order="zigzag"), whole)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [True, True]
    """
    given = AttentionInputs.of(
        "nn.ring_attention", q, k, v, axis, causal, order, sizes, lengths, scale, attn_mask, dropout_p
    )
    return blockwise(given, q, k, v)


def blockwise(given: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of checked arguments."""
    batch, heads, rows, _ = q.shape
    groups, features = k.shape[1], (k.shape[3], v.shape[3])
    fold = 1 if groups == heads else groups
    if fold > 1 or heads > groups:  # fold query heads that share a KV head into one sequence
        q = q.reshape(batch * groups, heads // groups, rows, features[0])
        k, v = (x.reshape(batch * groups, 1, x.shape[2], x.shape[3]) for x in (k, v))
    scale = given.scale
    if given.causal and scale <= 0:  # torch's kernel multiplies the mask's -inf by scale
        q, scale = q * scale, 1.0
    ring = Ring(given.axis, given.layout(fold), given.keys, features, scale, given.signature)
    with exact(q.device):
        return attend(ring, q, k, v).reshape(batch, heads, rows, features[1])


Attention = Callable[..., Tensor]
"""Takes q, k and v of (batch, heads, sequence, features); `is_causal`, `scale` and `enable_gqa` are passed only if they
differ from the defaults of torch's `scaled_dot_product_attention`."""

_VERB = "nn.ulysses_attention"
_LOCAL = Axis("local", 0, 1, None)  # type: ignore[arg-type]  # a single-rank axis sends nothing


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: AxisLike = None,
    *,
    causal: bool = False,
    order: Order = "plain",
    sizes: SizesLike = None,
    query_sizes: SizesLike = None,
    lengths: Lengths = None,
    scale: float | None = None,
    attention: Attention | None = None,
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention over a sequence that is sharded over the ranks; each rank computes some heads of the full sequence.

    ::

        V -> V    softmax(q_r K^T / sqrt(features)) V, where K, V are those of all ranks
                  backward: each rank gets the gradients of its q, k and v, summed over the queries of all ranks

    Forward and backward make three all-to-alls each. The number of heads need not be a multiple of the number of ranks:
    the first ranks get one more head, and with more ranks than heads some get none. With grouped queries, a KV head is
    sent to every rank that holds a matching query head, and its gradients are summed.

    Args:
        q: this rank's queries, (batch, heads, local sequence, features).
        k: this rank's keys; may have fewer heads than `q` (grouped queries).
        v: this rank's values; may have another number of features than `k`.
        axis: the ranks, as in every verb.
        causal: True if a position attends only to positions up to itself.
        order: how the sequence is sharded; see `gradmesh.nn.sequence`.
        sizes: each rank's number of keys, which may be 0, e.g. `sizes=(4, 3)`; None: the same on every rank; "auto":
            exchanged.
        query_sizes: each rank's number of queries, for cross attention; "auto": exchanged; None: equal to `sizes` if
            this rank has as many queries as keys, else the same on every rank.
        lengths: of documents, as in `gradmesh.nn.ring_attention`.
        scale: of the scores; defaults to 1 / sqrt(features).
        attention: computes this rank's heads on the full sequence in its original order: torch's
            `scaled_dot_product_attention` or a function with the same signature. It may apply masks and dropout; random
            numbers differ between ranks if their generators do. None: torch's fused kernels, with all derivatives.
        attn_mask: not supported; apply it in `attention`.
        dropout_p: not supported; apply it in `attention`.

    Returns:
        The attention output of this rank's queries, (batch, heads, local sequence, features of v).

    Raises:
        ArgumentError, ShapeError, DTypeError: invalid arguments on this rank.
        MismatchError: the ranks' arguments differ, or another rank raised.

    Example:
        >>> def on_each_rank():
        ...     x = torch.arange(24.0).view(1, 3, 4, 2) / 24  # 3 heads on 2 ranks
        ...     part = gm.nn.sequence.shard(x)
        ...     seen = gm.nn.ulysses_attention(part, part, part, causal=True)
        ...     whole = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        ...     return torch.allclose(gm.nn.sequence.unshard(seen), whole)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [True, True]
    """
    given = AttentionInputs.of(
        _VERB, q, k, v, axis, causal, order, sizes, lengths, scale, attn_mask, dropout_p, query_sizes
    )
    if attention is not None and (lengths is not None or not callable(attention)):
        Call(_VERB, q, given.axis).fail(
            "attention= must be callable and cannot be combined with lengths=",
            expected="a function such as torch.nn.functional.scaled_dot_product_attention, and lengths=None",
            got=f"attention={attention!r}, lengths={lengths!r}",
            remedy="omit lengths and mask the documents in your attention function, or omit attention"
            if callable(attention)
            else "pass a function, e.g. attention=torch.nn.functional.scaled_dot_product_attention, or omit it",
        )
    given = replace(given, signature=f"{given.signature}, query_sizes={given.rows}")
    heads = _Heads.of(q.shape[1], k.shape[1], given.axis)
    if given.axis.size == 1:
        return _local(given, heads, q, k, v, attention, scale)
    if (sent := heads.sent) is not None:
        k, v = (x.index_select(1, sent.to(x.device, non_blocking=True)) for x in (k, v))
    rows, keys = Sizes(given.rows), Sizes(given.keys)
    to_heads = AllToAll(given.axis, 1, 2, Sizes(heads.queries), rows, operand_desc=given.signature)
    features = k.shape[3], v.shape[3]
    q = _sorted(apply(to_heads, q), given, given.rows)
    kv_to_heads = replace(to_heads, split_sizes=Sizes(heads.groups), concat_sizes=keys)
    k, v = _sorted(apply(kv_to_heads, torch.cat((k, v), -1)), given, given.keys).split(features, -1)
    out = _sorted(_local(given, heads, q, k, v, attention, scale), given, given.rows, back=True)
    return apply(to_heads.adjoint, out)


@dataclass(frozen=True)
class _Heads:
    """The distribution of heads over the ranks."""

    queries: tuple[int, ...]  # each rank's number of query heads
    groups: tuple[int, ...]  # each rank's number of KV heads
    sent: Tensor | None  # the KV heads in the order in which they are sent; None: unchanged
    # for each local query head, its local KV head; None: equally many query heads for each
    used: Tensor | None

    @classmethod
    def of(cls, heads: int, groups: int, axis: Axis) -> _Heads:
        """Distribute query heads evenly; each KV head goes to every rank that has a matching query head."""
        queries, each = balanced(heads, axis.size), heads // groups
        cuts = intervals(queries)
        needed = [
            range(start // each, -(-stop // each) if stop > start else start // each) for start, stop in cuts
        ]
        sent = [group for some in needed for group in some]
        start, stop = cuts[axis.rank]
        used = [head // each - start // each for head in range(start, stop)]
        return cls(
            queries,
            tuple(len(some) for some in needed),
            None if sent == list(range(groups)) else torch.tensor(sent, dtype=torch.int64),
            None if start % each == stop % each == 0 else torch.tensor(used, dtype=torch.int64),
        )


def _local(
    given: AttentionInputs,
    heads: _Heads,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: Attention | None,
    scale: float | None,
) -> Tensor:
    """The attention of this rank's heads."""
    if not q.shape[1]:
        # No heads, but the result must depend on q, k and v: this rank takes part in their backward.
        with exact(q.device) if attention is None else nullcontext():
            return (q @ k.mT) @ v
    if heads.used is not None:
        used = heads.used.to(k.device, non_blocking=True)
        k, v = k.index_select(1, used), v.index_select(1, used)
    if attention is None:
        rows, keys = (q.shape[2],), (k.shape[2],)
        return blockwise(replace(given, axis=_LOCAL, rows=rows, keys=keys, order="plain"), q, k, v)
    kwargs: dict[str, Any] = {"is_causal": True} if given.causal else {}
    if q.shape[1] != k.shape[1]:
        kwargs["enable_gqa"] = True
    if scale is not None:  # it may be 0
        kwargs["scale"] = scale
    return attention(q, k, v, **kwargs)


def _sorted(x: Tensor, given: AttentionInputs, sizes: tuple[int, ...], *, back: bool = False) -> Tensor:
    """Restore the sequence's original order, or with `back` that of the ranks' shards."""
    if given.order == "plain" or sizes != given.keys:
        return x
    order = constants(positions_of(given.order, sizes), x.device, torch.int64)
    return x.index_select(2, order if back else order.argsort())
