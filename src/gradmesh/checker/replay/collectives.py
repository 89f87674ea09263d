"""Collectives as arithmetic on the ranks' tensors, through which autograd passes by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradmesh.checker.recording.tape import Sent
from gradmesh.checker.replay.verbs import results_of_verb

__all__ = ["results_of"]


def results_of(
    calls: Sequence[Sent], ins: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[torch.Size]]
) -> list[list[Tensor]] | None:
    """What each rank of a group gets; None where that is not known.

    Args:
        calls: of each rank.
        ins: what each rank handed in.
        shapes: of each rank's results, where they are written.
    """
    kind, first = calls[0].kind, calls[0]
    if first.verb is not None:
        verbs = [call.verb for call in calls if call.verb is not None]
        return [[y] for y in results_of_verb(verbs, [each[0] for each in ins])]
    if kind == "all_reduce":
        sums = [combined([each[at] for each in ins], first.reduce) for at in range(len(ins[0]))]
        return [list(sums) for _ in calls]
    if kind == "broadcast":
        return [list(ins[first.root]) for _ in calls]
    if kind == "reduce":
        sums = [combined([each[at] for each in ins], first.reduce) for at in range(len(ins[0]))]
        return [sums if at == first.root else list(ins[at]) for at in range(len(calls))]
    if kind == "all_gather":
        return [_shared([each[0] for each in ins], wanted) for wanted in shapes]
    if kind == "all_gather_each":
        parts = [_shared([each[at] for each in ins], []) for at in range(len(ins[0]))]
        return [[part[0] for part in parts] for _ in calls] if len(shapes[0]) in (0, len(parts)) else None
    if kind == "gather":
        return [[each[0] for each in ins] if at == first.root else [] for at in range(len(calls))]
    if kind == "scatter":
        return [[ins[first.root][at]] for at in range(len(calls))]
    if kind in ("reduce_scatter", "reduce_scatter_each"):
        return _reduced_parts(calls, ins, kind)
    if kind == "all_to_all":
        return [[each[at] for each in ins] for at in range(len(calls))]
    if kind == "all_to_all_flat":
        return _exchanged(calls, ins)
    return None


def combined(parts: Sequence[Tensor], reduce: str) -> Tensor:
    """The ranks' tensors made one."""
    stack = torch.stack(list(parts))
    if reduce in ("sum", ""):
        return stack.sum(0)
    if reduce in ("avg", "mean"):
        return stack.mean(0)
    if reduce in ("max", "min"):
        return stack.amax(0) if reduce == "max" else stack.amin(0)
    return stack.prod(0)


def _shared(parts: Sequence[Tensor], wanted: Sequence[torch.Size]) -> list[Tensor]:
    """All ranks' parts: one by one where so many are written, else along the first dim."""
    if len(wanted) == len(parts) and (len(parts) > 1 or wanted[0] == parts[0].shape):
        return [part.reshape(shape) for part, shape in zip(parts, wanted, strict=True)]
    whole = torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])
    return [whole.reshape(wanted[0]) if wanted else whole]


def _reduced_parts(calls: Sequence[Sent], ins: Sequence[Sequence[Tensor]], kind: str) -> list[list[Tensor]]:
    ranks, reduce = len(calls), calls[0].reduce
    if kind == "reduce_scatter" and len(ins[0]) == ranks and ranks > 1:
        return [[combined([each[at] for each in ins], reduce)] for at in range(ranks)]
    sums = [combined([each[at] for each in ins], reduce) for at in range(len(ins[0]))]
    return [[part.chunk(ranks)[at] for part in sums] for at in range(ranks)]


def _exchanged(calls: Sequence[Sent], ins: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    ranks, pieces = len(calls), []
    for call, (x, *_) in zip(calls, ins, strict=True):
        given = (call.splits or ([], []))[1] or [x.shape[0] // ranks] * ranks
        pieces.append(x.split(given))
    return [[torch.cat([pieces[source][at] for source in range(ranks)])] for at in range(ranks)]
