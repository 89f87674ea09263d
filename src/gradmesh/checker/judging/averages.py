"""Averages that are right for one objective and wrong for another: notes, as a script does not say what it means."""

from __future__ import annotations

from gradmesh.checker.judging.context import Context, with_text
from gradmesh.checker.judging.gradients import division, number_in
from gradmesh.checker.recording.tape import Op, Root, refs

__all__ = ["notes_on_averages"]

_NEAR = 5e-3
_MEANS = {"mean", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"}
_MEAN_REDUCTION = 1
"""torch's number for reduction="mean"."""


def notes_on_averages(context: Context) -> list[str]:
    """Communication hooks that sum, and means over different numbers of rows that are averaged."""
    return [*_summing_hook(context), *_mean_of_means(context)]


def _summing_hook(context: Context) -> list[str]:
    """DDP averages over the ranks; a hook that takes its place may only sum."""
    ranks = context.truth.different
    hook = context.tapes[0].comm_hook
    if hook < 0 or ranks < 2 or abs(context.expected - 1) > _NEAR or division(context) is not None:
        return []
    place = with_text(context.tapes[0].places, hook)
    return [
        f"the communication hook registered at {place} sums the gradients of {ranks} ranks and does not divide by "
        f"{ranks}: every gradient is that of the sum of the ranks' losses, {ranks} times the mean that DDP takes "
        f"without a hook. If the mean is meant, divide the bucket by {ranks}"
    ]


def _mean_of_means(context: Context) -> list[str]:
    """Each rank's loss is a mean over its rows, of which ranks have different numbers, and gradients are averaged."""
    ranks = range(len(context.tapes))
    if context.truth.different < len(ranks) or abs(context.expected * len(ranks) - 1) > _NEAR:
        return []
    means = [_mean_of(context, rank) for rank in ranks]
    known = [each for each in means if each is not None]
    if len(known) < len(means) or len({factor for _, factor, _ in known}) > 1:
        return []
    counts = [count for count, _, _ in known]
    if len(set(counts)) == 1:
        return []
    shown = ", ".join(f"{count} on rank {rank}" for rank, count in zip(ranks[:4], counts, strict=False))
    return [
        f"the loss at {context.place(0, known[0][2])} is a mean over different numbers of entries ({shown}), and the "
        f"gradients are averaged over the {len(ranks)} ranks: an entry counts 1/({len(ranks)} x its rank's number), "
        f"not 1/{sum(counts)} as in the mean over all of them. If that mean is meant, divide each rank's sum by the "
        "number on all ranks"
    ]


def _mean_of(context: Context, rank: int) -> tuple[int, float, int] | None:
    """Over how many entries a rank's loss is a mean, its factor, and the line; None for another kind of loss."""
    events = context.events(rank)
    roots = [event for event in events if isinstance(event, Root)]
    made = {out: event for event in events if isinstance(event, Op) for out in event.outs}
    if len(roots) != 1:
        return None
    number, factor = roots[0].id, 1.0
    for _ in range(6):
        op = made.get(number)
        taken = refs(op) if op is not None else []
        if op is None or not taken:
            return None
        name, x = op.name.split(".")[1], context.tensor(rank, taken[0])
        if name == "nll_loss_forward" and op.args[3] == _MEAN_REDUCTION:
            x = context.tensor(
                rank, op.outs[1]
            )  # what its entries weigh: those of ignore_index are not counted
            return None if x is None else (int(x), factor, op.site)
        if (name == "mean" and len(op.args) == 1) or (
            name in _MEANS - {"mean"} and (len(op.args) < 3 or op.args[2] == _MEAN_REDUCTION)
        ):
            return None if x is None else (x.numel(), factor, op.site)
        value = number_in(context, rank, op)
        if name == "sum" and len(op.args) == 1 and abs(1 / factor - round(1 / factor)) < 1e-4:
            return round(1 / factor), 1.0, op.site
        if name in ("mul", "div") and value:
            factor *= value if name == "mul" else 1 / value
        elif name not in ("view", "alias", "clone", "squeeze"):
            return None
        number = taken[0]
    return None
