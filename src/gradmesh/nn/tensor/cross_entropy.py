"""Vocabulary parallel cross entropy, from logits or fused with the linear layer that computes them."""

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
from gradmesh.errors import DTypeError
from gradmesh.nn.plain import upcast
from gradmesh.nn.tensor.vocab import check_replicated, local_ids, out_of_range
from gradmesh.runtime.mesh import AxisLike
from gradmesh.types import Convention, I, R
from gradmesh.verbs.call import Call, integer
from gradmesh.verbs.collectives import all_reduce, replicate
from gradmesh.verbs.collectives import sizes as sizes_of

__all__ = ["linear_cross_entropy", "vocab_parallel_cross_entropy"]

Reduction = Literal["mean", "sum", "none"]

SmoothingOver = Literal["all", "others"]
"""The vocabulary entries over which label smoothing spreads the target's weight: all, or all but the target."""


@dataclass(frozen=True)
class _Form:
    """The options of a cross entropy, and its name."""

    verb: str
    ignore_index: int
    label_smoothing: float
    smoothing_over: SmoothingOver
    z_loss: float
    reduction: Reduction

    def smoothing(self, vocabulary: int) -> float:
        """The weight of the mean over all entries that is equivalent to this smoothing."""
        if self.smoothing_over == "all":
            return self.label_smoothing
        return self.label_smoothing * vocabulary / (vocabulary - 1) if vocabulary > 1 else 0.0


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
    r"""Cross entropy of logits that are sharded over the vocabulary.

    ::

        V -> I    local logits (..., v_r), targets (...) -> loss () or (...)    backward: the local logits' gradient

        l = (1 - e) (z - x_t) + e (z - mean(x)) + c z^2,    z = log sum_v exp(x_v)   over the vocabulary of all ranks

    For each token, one all-reduce takes the maximum of one number and one sums two numbers (three with label
    smoothing), in float32 at least. Every rank gets the same loss, and does identical work on it.

    Args:
        logits: this rank's logits, the vocabulary along the last dim.
        target: global vocabulary ids; the same on every rank.
        axis: the ranks.
        sizes: each rank's number of vocabulary entries, e.g. `sizes=(4, 3)`; "auto": exchanged.
        ignore_index: a target that is ignored; the mean is over the others.
        label_smoothing: e, the share of the target's weight that is spread over the vocabulary.
        smoothing_over: "all": over all V entries, e / V each, as in `torch.nn.functional.cross_entropy`; the target
            keeps 1 - e + e / V. "others": over the V - 1 entries that are not the target, e / (V - 1) each, as in
            Megatron; the target keeps 1 - e. That is the formula above with e V / (V - 1) in place of e.
        z_loss: c, the weight of the squared log-normalizer z.
        reduction: "mean", "sum" or "none".

    Raises:
        ArgumentError: shapes or sizes do not match; a target is out of range (detected on a CPU).

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; smoothing over the others: its
    `vocab_parallel_cross_entropy(..., label_smoothing)`, with V the full vocabulary; z-loss: Chowdhery et al., PaLM
    (arXiv:2204.02311), section 5.

    Example:
        >>> def on_each_rank():
        ...     logits = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        ...     local = gm.shard(logits, dim=-1)
        ...     return round(gm.nn.vocab_parallel_cross_entropy(local, torch.tensor([1, 0])).item(), 4)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.8133, 0.8133]
    """
    form = _Form(
        "nn.vocab_parallel_cross_entropy", ignore_index, label_smoothing, smoothing_over, z_loss, reduction
    )
    call = _checked(form, logits, target, axis)
    each = _sizes(call, sizes, logits, -1)
    _check_target(call, target, sum(each), ignore_index)
    flat = target.reshape(-1)
    ids, here = local_ids(flat, each, call.axis.rank)
    parts = _parts(logits.reshape(len(flat), logits.shape[-1]), ids, here)
    return _reduced(form, _losses(form, parts, here, each, call), target)


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
    r"""Cross entropy of the logits `x @ weight.T + bias`, with one tile of logits in memory at a time.

    ::

        I or R, V -> I    x (..., d), local rows of weight (v_r, d), targets (...) -> loss () or (...)
                          backward: x's gradient is summed over the ranks; the weight's gradient is local

    The logits of `tile` tokens are computed, reduced to three numbers for each token, and recomputed in backward.

    Args:
        x: the hidden states, replicated.
        weight: this rank's rows of the table, as in `VocabParallelEmbedding` and `ColumnParallelLinear`.
        bias: of this rank's vocabulary entries.
        src: the type of `x`. `gm.I`: every rank computed it by identical work; `gm.R`: the result of `gm.all_gather`,
            as in sequence parallelism.
        tile: number of tokens at a time.
        target: global vocabulary ids; the same on every rank.
        axis: the ranks.
        sizes, ignore_index, label_smoothing, smoothing_over, z_loss, reduction: as in `vocab_parallel_cross_entropy`.

    Raises:
        ArgumentError: shapes or sizes do not match; a target is out of range (detected on a CPU).

    Example:
        >>> def on_each_rank():
        ...     x, table = torch.eye(2), torch.tensor([[1.0, 3.0], [2.0, 4.0]])
        ...     local = gm.shard(table)
        ...     return round(gm.nn.linear_cross_entropy(x, local, torch.tensor([1, 0]), tile=1).item(), 4)
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
            "tile must be a positive int" if fits else "the shapes of x, weight and bias do not match",
            expected="x (..., d), weight (v_r, d), bias (v_r,) with this rank's v_r entries; tile an int >= 1",
            got=f"x {list(x.shape)}, weight {list(weight.shape)}, "
            f"bias {None if bias is None else list(bias.shape)}, tile={tile!r}",
            remedy="pass this rank's rows of the table, e.g. weight=gm.shard(table)"
            if not fits
            else "omit it for 1024",
        )
    each = _sizes(call, sizes, weight, 0)
    _check_target(call, target, sum(each), ignore_index)
    ids, here = local_ids(target.reshape(-1), each, call.axis.rank)
    kind = call.choose("src", src, {I: I, R: R})
    vectors = (replicate(x, call.axis) if kind is I else x).reshape(target.numel(), x.shape[-1])
    tiles = zip(vectors.split(rows), ids.split(rows), here.split(rows), strict=True)
    # torch.func transforms do not support checkpoint's hooks; without grad there is no backward.
    once = not torch.is_grad_enabled() or transforms_active()
    made = [
        _of_tile(*one, weight, bias)
        if once
        else checkpoint(_of_tile, *one, weight, bias, use_reentrant=False, preserve_rng_state=False)
        for one in tiles
    ]
    largest, sums = zip(*made, strict=True)
    parts = torch.cat(largest), torch.cat(sums, dim=1)
    return _reduced(form, _losses(form, parts, here, each, call), target)


def _of_tile(
    x: Tensor, ids: Tensor, here: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _parts(linear(x, weight, bias), ids, here)


def _parts(logits: Tensor, ids: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's local maximum; and, relative to it, the sum of exponentials, the target's logit, and the sum."""
    logits = upcast(logits)
    if not logits.shape[-1]:
        zeros = logits.sum(-1)  # part of the graph
        return torch.full_like(zeros, -torch.inf).detach(), torch.stack((zeros, zeros, zeros))
    # The maximum cancels, so it is detached.
    largest = logits.detach().amax(-1)
    above = logits - _finite(largest).unsqueeze(-1)
    at_target = above.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return largest, torch.stack((above.exp().sum(-1), torch.where(here, at_target, 0), above.sum(-1)))


def _finite(shift: Tensor) -> Tensor:
    return torch.where(shift.isfinite(), shift, 0)


def _losses(
    form: _Form, parts: tuple[Tensor, Tensor], here: Tensor, each: Sequence[int], call: Call
) -> Tensor:
    """Each token's loss."""
    largest, (total, at_target, everything) = parts
    shift = _finite(all_reduce(largest, call.axis, op="max", dst=I))
    # Relative to the maximum over all ranks, differences of large logits lose no digits.
    moved = _finite(largest) - shift
    scale = torch.where(total.detach() > 0, moved, 0).exp()
    at_target = torch.where(here, at_target + moved, 0)
    sums = [total * scale, at_target]
    if form.label_smoothing:
        sums.append(everything + moved * each[call.axis.rank])
    total, at_target, *rest = all_reduce(torch.stack(sums), call.axis, dst=I)
    z: Tensor = total.log()
    loss: Tensor = z - at_target
    if rest:
        smoothing = form.smoothing(sum(each))
        loss = (1 - smoothing) * loss + smoothing * (z - rest[0] / sum(each))
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
            "target does not have one id for each token",
            expected=f"a tensor of int64 of shape {list(x.shape[:-1])}",
            got=f"{target.dtype} of shape {list(target.shape)}" if known else type(target).__name__,
            remedy="pass vocabulary ids with the shape of the operand without its last dim",
        )
    if not x.is_floating_point():
        call.fail(
            "the operand is not floating point",
            expected="a tensor of a floating-point dtype",
            got=str(x.dtype),
            remedy="convert it, e.g. x.float()",
            kind=DTypeError,
        )
    for name, weight, most in (("label_smoothing", form.label_smoothing, 1.0), ("z_loss", form.z_loss, inf)):
        if not isinstance(weight, int | float) or not 0 <= weight <= most:
            call.fail(
                f"{name} is out of range",
                expected=f"a number with 0 <= {name} <= {most:g}",
                got=f"{name}={weight!r}",
                remedy=f"pass e.g. {name}=0.1, or omit it",
            )
    check_replicated(target, call.axis)
    return call


def _sizes(call: Call, sizes: Sequence[int] | Literal["auto"], sharded: Tensor, dim: int) -> Sequence[int]:
    """Each rank's number of vocabulary entries."""
    if isinstance(sizes, str):
        call.choose("sizes", sizes, {"auto": 0})
        return sizes_of(sharded.detach(), call.axis, dim)
    given, local = [integer(n) for n in sizes] if isinstance(sizes, Iterable) else [], sharded.shape[dim]
    each = [n for n in given if n is not None and n >= 0]
    if len(given) != call.axis.size or len(each) != len(given) or each[call.axis.rank] != local:
        call.fail(
            "sizes does not match the ranks' vocabulary entries",
            expected=f"{call.axis.size} ints >= 0, with sizes[{call.axis.rank}] == {local}",
            got=f"sizes={sizes!r}",
            remedy='pass each rank\'s number of entries, e.g. sizes=(4, 3) for 7 over 2 ranks, or sizes="auto"',
        )
    return each


def _check_target(call: Call, target: Tensor, vocabulary: int, ignored: int) -> None:
    if out_of_range(target, vocabulary, ignored):
        call.fail(
            "a target is out of range",
            expected=f"0 <= target < {vocabulary}, or ignore_index={ignored}",
            got=f"targets from {int(target.min())} to {int(target.max())}",
            remedy="pass global vocabulary ids, on every rank",
        )
