"""What a call of attention was given, checked, and as a value."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor

from gradmesh.arguments import Call, SizesLike, integer
from gradmesh.axis import Axis, AxisLike
from gradmesh.errors import DTypeError, ShapeError
from gradmesh.nn.attention.tiles import Layout, Piece
from gradmesh.nn.order import Order, sizes_of, spans

__all__ = ["AttentionInputs", "Lengths"]

Lengths = Sequence[int] | Sequence[Sequence[int]] | Tensor | None

_ORDERS: dict[str, Order] = {"plain": "plain", "zigzag": "zigzag"}


@dataclass(frozen=True)
class AttentionInputs:
    """The arguments of a call of attention over the ranks of an axis.

    Attributes:
        axis: the ranks.
        rows: how many rows each rank has.
        keys: how many keys; other ones in cross attention alone.
        order: how the sequence lies on the ranks.
        causal: whether a row sees only keys up to its own place.
        lengths: of documents; one list for each sequence of the batch, or one for all.
        scale: of the scores.
        words: all of it in words, for the ranks to compare.
    """

    axis: Axis
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    order: Order
    causal: bool
    lengths: tuple[tuple[int, ...], ...] | None
    scale: float
    words: str

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
            ArgumentError, ShapeError, DTypeError: on this rank; the others hear of it, and raise `MismatchError`.
        """
        call = Call(verb, k, axis, async_op=True)
        for x in (q, v):
            Call(verb, x, axis, async_op=True)
        _check_tensors(call, q, k, v)
        _refuse_unsupported(call, attn_mask, dropout_p)
        causal = call.flag(causal, "causal")
        chosen = call.choose("order", order, _ORDERS)
        keys = call.explicit_sizes(sizes, 2).explicit
        if keys[call.axis.rank] != k.shape[2]:
            call.fail(
                "sizes is not what this rank has",
                expected=f"{keys[call.axis.rank]} keys, from sizes={keys}",
                got=f"{k.shape[2]} keys",
                remedy='pass the true sizes, or sizes="auto" to have them exchanged',
                kind=ShapeError,
            )
        if chosen == "zigzag" and keys != sizes_of(chosen, sum(keys), len(keys)):
            call.fail(
                "the parts are not those of a sequence in zigzag order",
                expected=f"sizes {sizes_of(chosen, sum(keys), len(keys))}",
                got=f"sizes {keys}",
                remedy="cut the sequence with gradmesh.nn.sequence.shard",
                kind=ShapeError,
            )
        rows = keys if q.shape[2] == k.shape[2] else tuple(q.shape[2] for _ in keys)
        if query_sizes is not None:
            rows = Call(verb, q, axis, async_op=True).explicit_sizes(query_sizes, 2).explicit
        if rows[call.axis.rank] != q.shape[2]:
            call.fail(
                "query_sizes is not what this rank has",
                expected=f"{rows[call.axis.rank]} queries, from query_sizes={rows}",
                got=f"{q.shape[2]} queries",
                remedy='pass the true sizes, or query_sizes="auto" to have them exchanged',
                kind=ShapeError,
            )
        one = rows == keys
        documents = _documents(call, lengths, sum(keys), q.shape[0])
        if not one and (causal or documents is not None):
            call.fail(
                "rows and keys are not places of one sequence",
                expected="as many rows as keys, for causal attention and for documents",
                got=f"{q.shape[2]} rows and {k.shape[2]} keys",
                remedy="leave out causal and lengths for cross attention",
                kind=ShapeError,
            )
        factor = q.shape[3] ** -0.5 if scale is None else scale
        if not isinstance(factor, float | int) or isinstance(factor, bool):
            call.fail(
                "scale is no number",
                expected="a float, or None for 1 / sqrt(features)",
                got=f"scale={scale!r}",
                remedy="pass a plain number; multiply q for a learned one",
            )
        told = f"{causal=}, order={chosen!r}, scale={float(factor):.9g}, lengths={_shown(documents)}"
        words = f"{verb}({told}; q of {q.shape[1]} heads, k of {k.shape[3]} features)"
        return cls(call.axis, rows, keys, chosen, causal, documents, float(factor), words)

    def layout(self, fold: int) -> Layout:
        """Who has which part of the sequence.

        Args:
            fold: into how many a sequence of the batch was cut, by groups of heads.
        """
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
            expected="(batch, heads, part of the sequence, features)",
            got=shapes,
            remedy="unsqueeze the missing dimensions",
            kind=ShapeError,
        )
    fits = k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or not (k.shape[1] and k.shape[3]) or q.shape[1] % k.shape[1]:
        call.fail(
            "q, k and v do not fit together",
            expected="one batch; as many keys as values; features of q and k alike; heads of q that those of k divide",
            got=shapes,
            remedy="for grouped queries let each head of k and v serve as many heads of q",
            kind=ShapeError,
        )
    alike = len({(x.dtype, x.device) for x in (q, k, v)}) == 1
    if not alike or not q.is_floating_point() or q.dtype.itemsize < 2:
        call.fail(
            "q, k and v have no dtype for attention",
            expected="one floating-point dtype of 2 bytes or more, on one device",
            got=", ".join(
                f"{name} {x.dtype} on {x.device}" for name, x in zip("qkv", (q, k, v), strict=True)
            ),
            remedy="cast them to one dtype",
            kind=DTypeError,
        )


def _refuse_unsupported(call: Call, attn_mask: object, dropout_p: object) -> None:
    if attn_mask is not None:
        call.fail(
            "a mask of one's own is not taken: whole, it would be as large as the scores",
            expected="causal=, and lengths= for documents and padding",
            got="attn_mask",
            remedy="use gradmesh.nn.ulysses_attention with attention= a function that knows the mask of all places",
        )
    if dropout_p:
        call.fail(
            "there is no dropout of attention weights",
            expected="dropout_p=0",
            got=f"dropout_p={dropout_p!r}",
            remedy="drop out the result, or use gradmesh.nn.ulysses_attention with attention= a function that does it",
        )


def _documents(call: Call, lengths: Lengths, total: int, batch: int) -> tuple[tuple[int, ...], ...] | None:
    """The documents' lengths of each sequence of the batch, or those of all."""
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
            "lengths are not those of the documents in the sequence",
            expected=f"ints that add up to {total}, the length over all ranks; or {batch} lists of these, one for each "
            "sequence of the batch, which may be shorter where it ends in padding",
            got=f"lengths={lengths!r}",
            remedy="pass the lengths of all ranks' documents, the same on every rank: cu_seqlens.diff()",
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
