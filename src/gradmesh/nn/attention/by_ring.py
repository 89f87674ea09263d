"""Ring attention."""

from __future__ import annotations

from torch import Tensor

from gradmesh.nn.attention.blocks import exact
from gradmesh.nn.attention.inputs import AttentionInputs, Lengths
from gradmesh.nn.attention.node import attend
from gradmesh.nn.attention.ring import Ring
from gradmesh.nn.order import Order
from gradmesh.runtime.mesh import AxisLike
from gradmesh.verbs.call import SizesLike

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
