"""Ring attention."""

from __future__ import annotations

from torch import Tensor

from gradmesh.arguments import SizesLike
from gradmesh.axis import AxisLike
from gradmesh.nn.attention.blocks import exact
from gradmesh.nn.attention.inputs import AttentionInputs, Lengths
from gradmesh.nn.attention.node import attend
from gradmesh.nn.attention.ring import Ring
from gradmesh.nn.order import Order

__all__ = ["blockwise", "ring_attention"]


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
    """Attention over a sequence that is cut over the ranks: keys and values go round, queries stay.

    ::

        V -> V    softmax(q_r K^T / sqrt(features)) V, where K, V are those of all ranks

    It is exact: the value and every derivative are those of `torch.nn.functional.scaled_dot_product_attention` on the
    whole sequence. A block of keys and values travels while the one before it is attended to; in backward they come
    again, and their gradients behind them, so that a rank keeps no more than its own part. What a causal mask or the
    ends of documents leave empty is not computed.

    Args:
        q: this rank's queries, (batch, heads, its part of the sequence, features).
        k: its keys. Fewer heads than those of q serve as many of these each (grouped queries).
        v: its values; other features than those of k are allowed.
        axis: the ranks, as in every verb.
        causal: whether a place of the sequence sees only places up to itself.
        order: how the sequence lies on the ranks, see `gradmesh.nn.sequence`. With `causal`, "zigzag" gives all ranks
            the same work.
        sizes: each rank's number of keys, which may be 0; None: the same on every rank; "auto": found by one small
            exchange.
        lengths: of the documents that the sequence is made of, over all ranks, the same on every rank; no place sees
            another document. A list for each sequence of the batch may be shorter than the sequence: what follows is
            padding, whose result is 0.
        scale: of the scores; by default 1 / sqrt(features).
        attn_mask: not taken; see `gradmesh.nn.ulysses_attention`.
        dropout_p: not taken; likewise.

    Returns:
        What this rank's queries see, (batch, heads, its part of the sequence, features of v).

    Raises:
        ArgumentError, ShapeError, DTypeError: what is given does not fit together, on this rank.
        MismatchError: the ranks say different things, or another rank refuses its call.

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
        "nn.ring_attention",
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
    )
    return blockwise(given, q, k, v)


def blockwise(given: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as it was asked for."""
    batch, heads, rows, _ = q.shape
    groups, features = k.shape[1], (k.shape[3], v.shape[3])
    fold = 1 if groups == heads else groups
    if fold > 1 or heads > groups:  # the heads that share keys come together
        q = q.reshape(batch * groups, heads // groups, rows, features[0])
        k, v = (x.reshape(batch * groups, 1, x.shape[2], x.shape[3]) for x in (k, v))
    scale = given.scale
    if given.causal and scale <= 0:  # torch's kernel multiplies by it the -inf of what is masked
        q, scale = q * scale, 1.0
    ring = Ring(given.axis, given.layout(fold), given.keys, features, scale, given.words)
    with exact(q.device):
        return attend(ring, q, k, v).reshape(batch, heads, rows, features[1])
