"""Ulysses attention: an all-to-all gives each rank some heads of the full sequence.

Source: S. A. Jacobs and others, "DeepSpeed Ulysses: system optimizations for enabling training of extreme long sequence
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

from gradmesh.autograd.rule import apply
from gradmesh.nn.attention.blocks import exact
from gradmesh.nn.attention.by_ring import blockwise
from gradmesh.nn.attention.inputs import AttentionInputs, Lengths
from gradmesh.nn.order import Order, positions_of
from gradmesh.ops.all_to_all import AllToAll
from gradmesh.ops.sizes import Sizes
from gradmesh.runtime.mesh import Axis, AxisLike, balanced
from gradmesh.verbs.call import Call, SizesLike

__all__ = ["Attention", "ulysses_attention"]

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
        k, v = k.index_select(1, sent.to(k.device)), v.index_select(1, sent.to(v.device))
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
    """The distribution of heads over the ranks.

    Attributes:
        queries: each rank's number of query heads.
        groups: each rank's number of KV heads.
        sent: the KV heads in the order in which they are sent; None: unchanged.
        used: for each local query head, its local KV head; None: equally many query heads for each.
    """

    queries: tuple[int, ...]
    groups: tuple[int, ...]
    sent: Tensor | None
    used: Tensor | None

    @classmethod
    def of(cls, heads: int, groups: int, axis: Axis) -> _Heads:
        """Distribute query heads evenly; each KV head goes to every rank that has a matching query head."""
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
    """The attention of this rank's heads."""
    if not q.shape[1]:
        # No heads, but the result must depend on q, k and v: this rank takes part in their backward.
        with exact(q.device) if attention is None else nullcontext():
            return (q @ k.mT) @ v
    if heads.used is not None:
        used = heads.used.to(k.device)
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
    order = torch.tensor(positions_of(given.order, sizes), dtype=torch.int64, device=x.device)
    return x.index_select(2, order if back else order.argsort())
