"""Checked arguments of a distributed attention call."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor

from gradmesh.errors import DTypeError, ShapeError
from gradmesh.nn.attention.tiles import Layout, Piece
from gradmesh.nn.order import Order, sizes_of, spans
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.verbs.call import Call, SizesLike, integer

__all__ = ["AttentionInputs", "Lengths"]

Lengths = Sequence[int] | Sequence[Sequence[int]] | Tensor | None

_ORDERS: dict[str, Order] = {"plain": "plain", "zigzag": "zigzag"}


@dataclass(frozen=True)
class AttentionInputs:
    """Checked arguments of a distributed attention call.

    Attributes:
        axis: the ranks.
        rows: each rank's number of queries.
        keys: each rank's number of keys; differs from `rows` in cross attention only.
        order: how the sequence is sharded.
        causal: True if a position attends only to positions up to itself.
        lengths: of documents; one tuple for each sequence of the batch, or one for all.
        scale: of the scores.
        signature: all of it as text, which the ranks compare.
    """

    axis: Axis
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    order: Order
    causal: bool
    lengths: tuple[tuple[int, ...], ...] | None
    scale: float
    signature: str

    @classmethod
    def of(
        cls,
        verb: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        axis: AxisLike,
        *,
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
        _check_size(call, "sizes", "keys", keys, k.shape[2])
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
        _check_size(call, "query_sizes", "queries", rows, q.shape[2])
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
        if not isinstance(factor, float | int) or isinstance(factor, bool):
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


def _check_size(call: Call, name: str, unit: str, sizes: tuple[int, ...], size: int) -> None:
    rank = call.axis.rank
    if sizes[rank] != size:
        call.fail(
            f"{name} does not match this rank's number of {unit}",
            expected=f"{sizes[rank]} {unit}, from {name}={sizes}",
            got=f"{size} {unit}",
            remedy=f'pass each rank\'s number of {unit} as {name}, here {size} for rank {rank}, or {name}="auto" to '
            "exchange them",
            kind=ShapeError,
        )


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
