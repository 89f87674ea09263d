"""Attention by heads: each rank gets some heads of the whole sequence.

S. A. Jacobs and others, "DeepSpeed Ulysses: system optimizations for enabling training of extreme long sequence
transformer models", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from gradmesh.arguments import Call, SizesLike
from gradmesh.autograd import apply
from gradmesh.axis import Axis, AxisLike, balanced
from gradmesh.nn.attention.blocks import exact
from gradmesh.nn.attention.by_ring import blockwise
from gradmesh.nn.attention.inputs import AttentionInputs, Lengths
from gradmesh.nn.order import Order, places
from gradmesh.ops.all_to_all import AllToAll
from gradmesh.ops.sizes import Sizes

__all__ = ["Attention", "ulysses_attention"]

Attention = Callable[..., Tensor]
"""Takes q, k and v of (batch, heads, sequence, features), and of `is_causal`, `scale` and `enable_gqa` those that are
not as torch's `scaled_dot_product_attention` has them by default."""

_VERB = "nn.ulysses_attention"
_ALONE = Axis("alone", 0, 1, None)  # type: ignore[arg-type]  # nothing is sent


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
    """Attention over a sequence that is cut over the ranks: each rank gets the whole sequence of some of the heads.

    ::

        V -> V    softmax(q_r K^T / sqrt(features)) V, where K, V are those of all ranks

    Two exchanges go there and one comes back, forward and backward. The ranks need not divide the heads: the first
    get one more, and with more ranks than heads some have none. Keys and values of grouped queries go to each rank
    that has queries of theirs, and their gradients are summed.

    Args:
        q: this rank's queries, (batch, heads, its part of the sequence, features).
        k: its keys. Fewer heads than those of q serve as many of these each.
        v: its values; other features than those of k are allowed.
        axis: the ranks, as in every verb.
        causal: whether a place of the sequence sees only places up to itself.
        order: how the sequence lies on the ranks, see `gradmesh.nn.sequence`.
        sizes: each rank's number of keys, which may be 0; None: the same on every rank; "auto": found by one small
            exchange.
        query_sizes: each rank's number of queries, for cross attention; "auto": found by one small exchange; None: as
            many as keys where this rank has as many, else the same on every rank.
        lengths: of documents, as in `gradmesh.nn.ring_attention`.
        scale: of the scores; by default 1 / sqrt(features).
        attention: computes the heads that are here, on the whole sequence in its order: torch's
            `scaled_dot_product_attention`, or what is called like it. Masks and dropout are its affair; what it draws
            differs from rank to rank if the ranks' generators do. None: torch's fused kernels, with all derivatives.
        attn_mask: not taken here, but by `attention`.
        dropout_p: likewise.

    Returns:
        What this rank's queries see, (batch, heads, its part of the sequence, features of v).

    Raises:
        ArgumentError, ShapeError, DTypeError: what is given does not fit together, on this rank.
        MismatchError: the ranks say different things, or another rank refuses its call.

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
        _VERB,
        q,
        k,
        v,
        axis,
        causal=causal,
        order=order,
        sizes=sizes,
        lengths=lengths,
        scale=scale,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        query_sizes=query_sizes,
    )
    if attention is not None and (lengths is not None or not callable(attention)):
        Call(_VERB, q, given.axis).fail(
            "attention is not to be called like this",
            expected="a function like scaled_dot_product_attention, without lengths",
            got=f"attention={attention!r}, lengths={lengths!r}",
            remedy="leave attention out, or let it know the documents itself",
        )
    given = replace(given, words=f"{given.words}, query_sizes={given.rows}")
    heads = _Heads.of(q.shape[1], k.shape[1], given.axis)
    if given.axis.size == 1:
        return _local(given, heads, q, k, v, attention, scale)
    if (asked := heads.sent) is not None:
        k, v = k.index_select(1, asked.to(k.device)), v.index_select(1, asked.to(v.device))
    rows, keys = Sizes(given.rows), Sizes(given.keys)
    there = AllToAll(given.axis, 1, 2, Sizes(heads.queries), rows, operand_desc=given.words)
    features = k.shape[3], v.shape[3]
    q = _sorted(apply(there, q), given, given.rows)
    others = replace(there, split_sizes=Sizes(heads.groups), concat_sizes=keys)
    k, v = _sorted(apply(others, torch.cat((k, v), -1)), given, given.keys).split(features, -1)
    seen = _sorted(_local(given, heads, q, k, v, attention, scale), given, given.rows, back=True)
    return apply(there.adjoint, seen)


@dataclass(frozen=True)
class _Heads:
    """Which rank gets which heads.

    Attributes:
        queries: how many heads of queries each rank gets.
        groups: how many heads of keys.
        sent: the heads of keys in the order in which they are sent; None: as they are.
        used: the head of keys that each of this rank's heads of queries sees; None: as many for each.
    """

    queries: tuple[int, ...]
    groups: tuple[int, ...]
    sent: Tensor | None
    used: Tensor | None

    @classmethod
    def of(cls, heads: int, groups: int, axis: Axis) -> _Heads:
        """Cut heads evenly; each head of keys goes where one of its heads of queries does."""
        queries, each = balanced(heads, axis.size), heads // groups
        cuts = list(pairwise(accumulate(queries, initial=0)))
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
    """The attention of the heads that are here."""
    if not q.shape[1]:
        # Of no heads, and yet this rank takes part in the backward.
        with exact(q.device) if attention is None else nullcontext():
            return (q @ k.mT) @ v
    if heads.used is not None:
        used = heads.used.to(k.device)
        k, v = k.index_select(1, used), v.index_select(1, used)
    if attention is None:
        rows, keys = (q.shape[2],), (k.shape[2],)
        return blockwise(replace(given, axis=_ALONE, rows=rows, keys=keys, order="plain"), q, k, v)
    told: dict[str, Any] = {"is_causal": True} if given.causal else {}
    if q.shape[1] != k.shape[1]:
        told["enable_gqa"] = True
    if scale is not None:  # which may be 0
        told["scale"] = scale
    return attention(q, k, v, **told)


def _sorted(x: Tensor, given: AttentionInputs, sizes: tuple[int, ...], *, back: bool = False) -> Tensor:
    """The whole sequence in its own order, or back in that of the ranks."""
    if given.order == "plain" or sizes != given.keys:
        return x
    order = torch.tensor(places(given.order, sizes), dtype=torch.int64, device=x.device)
    return x.index_select(2, order if back else order.argsort())
