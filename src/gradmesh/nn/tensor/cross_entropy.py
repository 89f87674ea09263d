"""Cross entropy over a vocabulary that is cut over ranks, from logits or without ever having them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from gradmesh._torch import transforms_active
from gradmesh.arguments import Call, integer
from gradmesh.axis import AxisLike
from gradmesh.collectives import all_reduce, replicate
from gradmesh.collectives import sizes as sizes_of
from gradmesh.errors import DTypeError
from gradmesh.nn.plain import widened
from gradmesh.nn.tensor.words import out_of_range, place, same_on_all_ranks
from gradmesh.types import Convention, I, R

__all__ = ["linear_cross_entropy", "vocab_parallel_cross_entropy"]

Reduction = Literal["mean", "sum", "none"]

SmoothingOver = Literal["all", "others"]
"""Over which words label smoothing spreads the target's weight: all, or all but the target."""


@dataclass(frozen=True)
class _Form:
    """Which cross entropy it is.

    Attributes:
        verb: who asks.
        ignore_index: the target that does not count.
        label_smoothing: the share of the target's weight that all words get.
        smoothing_over: whether the target is one of these words.
        z_loss: the weight of the squared logarithm of the normaliser.
        reduction: what is made of the tokens' losses.
    """

    verb: str
    ignore_index: int
    label_smoothing: float
    smoothing_over: SmoothingOver
    z_loss: float
    reduction: Reduction

    def smoothing(self, words: int) -> float:
        """The factor of the mean over all words that makes it this smoothing."""
        if self.smoothing_over == "all":
            return self.label_smoothing
        return self.label_smoothing * words / (words - 1) if words > 1 else 0.0


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: AxisLike = None,
    *,
    sizes: Sequence[int] | Literal["auto"] = "auto",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_over: SmoothingOver = "all",
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Cross entropy of logits of which each rank has those of some words.

    ::

        V -> I    own logits (..., v_r), targets (...) -> loss () or (...)      backward: each rank its logits' gradient

        l = (1 - e) (z - x_t) + e (z - mean(x)) + c z^2,    z = log sum_v exp(x_v)   over the words of all ranks

    Two numbers for each token are summed over the ranks, three with label smoothing, and one is compared, whatever the
    vocabulary; sums are in float32 at least. Every rank gets the same loss, and repeats the same work on it.

    Args:
        logits: this rank's part, the words along the last dim.
        target: the words, counted over the whole vocabulary; the same on every rank.
        axis: the ranks.
        sizes: how many words each rank has; "auto" asks, in one small exchange.
        ignore_index: a target that does not count; the mean is over the others.
        label_smoothing: e, the share of the target's weight that is spread over other words.
        smoothing_over: "all": over all V words, e / V each, as `torch.nn.functional.cross_entropy`, so that the target
            keeps 1 - e + e / V; "others": over the V - 1 words that are not the target, e / (V - 1) each, as Megatron,
            so that the target keeps 1 - e. That is the formula above with e V / (V - 1) in place of e.
        z_loss: c, the weight of the square of the logarithm of the normaliser.
        reduction: "mean", "sum" or "none".

    Raises:
        ArgumentError: shapes or sizes that do not fit, a target (on a CPU) that is no word.

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; smoothing over the others: its
    `vocab_parallel_cross_entropy(..., label_smoothing)`, with V the words of all ranks; z-loss: Chowdhery et al., PaLM
    (arXiv:2204.02311), section 5.

    Example:
        >>> def on_each_rank():
        ...     logits = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        ...     own = gm.shard(logits, dim=-1)
        ...     return round(gm.nn.vocab_parallel_cross_entropy(own, torch.tensor([1, 0])).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.8133, 0.8133]
    """
    form = _Form(
        "nn.vocab_parallel_cross_entropy", ignore_index, label_smoothing, smoothing_over, z_loss, reduction
    )
    call = _checked(form, logits, target, axis)
    told = _told(call, sizes, logits, -1)
    _check_words(call, target, sum(told), ignore_index)
    flat = target.reshape(-1)
    words, own = place(flat, told, call.axis.rank)
    parts = _parts(logits.reshape(len(flat), logits.shape[-1]), words, own)
    return _reduced(form, _losses(form, parts, own, told, call), target)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    axis: AxisLike = None,
    *,
    bias: Tensor | None = None,
    sizes: Sequence[int] | Literal["auto"] = "auto",
    src: Convention = I,
    tile: int = 1024,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_over: SmoothingOver = "all",
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Cross entropy of `x @ weight.T + bias`, of which no rank ever has more logits than a tile's.

    ::

        I or R, V -> I    x (..., d), own rows of weight (v_r, d), targets (...) -> loss () or (...)
                          backward: x's gradient is summed over the ranks, each rank has its rows' gradient

    The logits of `tile` tokens at a time are made and reduced to three numbers a token, and made again in backward.

    Args:
        x: the vectors; whole, and the same on every rank.
        weight: this rank's rows of the table, as `VocabParallelEmbedding` and `ColumnParallelLinear` have them.
        bias: of this rank's words.
        src: what x is: `gm.I`, what every rank has made by the same work; `gm.R`, as `gm.all_gather` makes it of the
            own rows in sequence parallelism.
        tile: how many tokens at a time.
        target: the words, as for `vocab_parallel_cross_entropy`.
        axis: the ranks.
        sizes: how many words each rank has; "auto" asks.
        ignore_index: a target that does not count.
        label_smoothing: the share of the target's weight that is spread over other words.
        smoothing_over: "all" words, or all "others" than the target; as for `vocab_parallel_cross_entropy`.
        z_loss: the weight of the square of the logarithm of the normaliser.
        reduction: "mean", "sum" or "none".

    Raises:
        ArgumentError: shapes or sizes that do not fit, a target (on a CPU) that is no word.

    Example:
        >>> def on_each_rank():
        ...     x, table = torch.eye(2), torch.tensor([[1.0, 3.0], [2.0, 4.0]])
        ...     own = gm.shard(table)
        ...     return round(gm.nn.linear_cross_entropy(x, own, torch.tensor([1, 0]), tile=1).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.8133, 0.8133]
    """
    form = _Form("nn.linear_cross_entropy", ignore_index, label_smoothing, smoothing_over, z_loss, reduction)
    call = _checked(form, x, target, axis)
    rows = integer(tile)
    fits = (
        weight.dim() == 2
        and weight.shape[1] == x.shape[-1]
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits or rows is None or rows < 1:
        call.fail(
            "x, weight, bias and tile do not fit",
            expected="x (..., d), weight (own words, d), bias (own words,), tile >= 1",
            got=f"x {list(x.shape)}, weight {list(weight.shape)}, "
            f"bias {None if bias is None else list(bias.shape)}, tile={tile!r}",
            remedy="pass this rank's rows of the table",
        )
    told = _told(call, sizes, weight, 0)
    _check_words(call, target, sum(told), ignore_index)
    words, own = place(target.reshape(-1), told, call.axis.rank)
    kind = call.choose("src", src, {I: I, R: R})
    vectors = (replicate(x, call.axis) if kind is I else x).reshape(target.numel(), x.shape[-1])
    tiles = zip(vectors.split(rows), words.split(rows), own.split(rows), strict=True)
    # A transform of torch.func takes no hooks, and without grad there is nothing to be made again.
    once = not torch.is_grad_enabled() or transforms_active()
    made = [
        _of_tile(*one, weight, bias)
        if once
        else checkpoint(_of_tile, *one, weight, bias, use_reentrant=False, preserve_rng_state=False)
        for one in tiles
    ]
    largest, sums = zip(*made, strict=True)
    parts = torch.cat(largest), torch.cat(sums, dim=1)
    return _reduced(form, _losses(form, parts, own, told, call), target)


def _of_tile(
    x: Tensor, words: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _parts(linear(x, weight, bias), words, own)


def _parts(logits: Tensor, words: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """A shift near each token's logits here; the sum of exponentials, the target and the sum of the logits above it."""
    logits = widened(logits)
    if not logits.shape[-1]:
        nothing = logits.sum(-1)  # zeros that are part of the graph
        return torch.full_like(nothing, -torch.inf).detach(), torch.stack((nothing, nothing, nothing))
    # The shift cancels, so that it has no derivative.
    largest = logits.detach().amax(-1)
    above = logits - _finite(largest).unsqueeze(-1)
    there = above.gather(-1, words.unsqueeze(-1)).squeeze(-1)
    return largest, torch.stack((above.exp().sum(-1), torch.where(own, there, 0), above.sum(-1)))


def _finite(shift: Tensor) -> Tensor:
    return torch.where(shift.isfinite(), shift, 0)


def _losses(
    form: _Form, parts: tuple[Tensor, Tensor], own: Tensor, told: Sequence[int], call: Call
) -> Tensor:
    """Each token's loss."""
    largest, (total, there, everything) = parts
    shift = _finite(all_reduce(largest, call.axis, op="max", dst=I))
    # From here on all ranks' numbers are above one shift: differences of large logits lose no digits.
    moved = _finite(largest) - shift
    scale = torch.where(total.detach() > 0, moved, 0).exp()
    there = torch.where(own, there + moved, 0)
    sums = [total * scale, there]
    if form.label_smoothing:
        sums.append(everything + moved * told[call.axis.rank])
    total, there, *rest = all_reduce(torch.stack(sums), call.axis, dst=I)
    z: Tensor = total.log()
    loss: Tensor = z - there
    if rest:
        smoothing = form.smoothing(sum(told))
        loss = (1 - smoothing) * loss + smoothing * (z - rest[0] / sum(told))
    return loss if form.z_loss == 0 else loss + form.z_loss * (z + shift) ** 2


def _reduced(form: _Form, losses: Tensor, target: Tensor) -> Tensor:
    counted = target.reshape(-1) != form.ignore_index
    losses = torch.where(counted, losses, 0)
    if form.reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / counted.sum() if form.reduction == "mean" else losses.sum()


def _checked(form: _Form, x: Tensor, target: Tensor, axis: AxisLike) -> Call:
    call = Call(form.verb, x, axis)
    call.choose("reduction", form.reduction, {"mean": 0, "sum": 0, "none": 0})
    call.choose("smoothing_over", form.smoothing_over, {"all": 0, "others": 0})
    known = isinstance(target, Tensor)
    fits = (
        known and x.dim() > 0 and target.shape == x.shape[:-1] and target.dtype in (torch.int64, torch.int32)
    )
    if not fits:
        call.fail(
            "there is not one target for each token",
            expected=f"a tensor of int64 of shape {list(x.shape[:-1])}",
            got=f"{target.dtype} of shape {list(target.shape)}" if known else type(target).__name__,
            remedy="pass the words' numbers; the vocabulary is the last dim of the operand",
        )
    if not x.is_floating_point():
        call.fail(
            "the operand has no gradient",
            expected="a tensor of a floating-point dtype",
            got=str(x.dtype),
            remedy="cast it",
            kind=DTypeError,
        )
    for name, weight, most in (("label_smoothing", form.label_smoothing, 1.0), ("z_loss", form.z_loss, inf)):
        if not isinstance(weight, int | float) or not 0 <= weight <= most:
            call.fail(
                f"{name} is no weight",
                expected=f"0 <= {name} <= {most:g}",
                got=f"{name}={weight!r}",
                remedy="pass 0.1 for a tenth",
            )
    same_on_all_ranks(target, call.axis)
    return call


def _told(call: Call, sizes: Sequence[int] | Literal["auto"], words: Tensor, dim: int) -> Sequence[int]:
    """Each rank's number of words."""
    if isinstance(sizes, str):
        call.choose("sizes", sizes, {"auto": 0})
        return sizes_of(words.detach(), call.axis, dim)
    given, own = [integer(n) for n in sizes] if isinstance(sizes, Iterable) else [], words.shape[dim]
    told = [n for n in given if n is not None and n >= 0]
    if len(given) != call.axis.size or len(told) != len(given) or told[call.axis.rank] != own:
        call.fail(
            "the sizes are not those of the ranks' words",
            expected=f"{call.axis.size} sizes, {own} for this rank",
            got=f"sizes={sizes!r}",
            remedy="pass each rank's number of words, or sizes='auto'",
        )
    return told


def _check_words(call: Call, target: Tensor, words: int, ignored: int) -> None:
    if out_of_range(target, words, ignored):
        call.fail(
            "a target is not in the vocabulary",
            expected=f"0 <= target < {words}, or ignore_index={ignored}",
            got=f"targets from {int(target.min())} to {int(target.max())}",
            remedy="pass the words' numbers in the whole vocabulary",
        )
