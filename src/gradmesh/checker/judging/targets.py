"""Running averages of parameters, as a target network is: copies of them differ between ranks that share those."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradmesh.checker.findings import Finding
from gradmesh.checker.judging.context import Context, finding
from gradmesh.checker.judging.parameters import Got
from gradmesh.checker.judging.segments import Segment
from gradmesh.checker.judging.truth import near
from gradmesh.checker.judging.values import held_on
from gradmesh.checker.recording.tape import Step

__all__ = ["targets_apart"]

_REMEDY = (
    "Make the copy after the parameters are the same on all ranks, target = copy.deepcopy(model.module) behind "
    "DistributedDataParallel(model); or broadcast it: dist.broadcast(p, src=0) for p in target.parameters()."
)


def targets_apart(context: Context, following: Sequence[Segment]) -> list[Finding]:
    """What is moved towards a parameter that ranks share, by the same part of the way, and differs between them."""
    for later in following:
        for got in context.got:
            if len(got.parts) < 2 or got.parts[0].param.whole:
                continue
            steps = [(context.segment.steps[rank][0], later.steps[rank][0]) for rank in got.ranks]
            for name in set.intersection(*({*now.frozen, *now.buffers} for now, _ in steps)):
                values = [_held(now, name) for now, _ in steps]
                shares = [
                    _kept(value, _held(then, name), part.param.after)
                    for value, (_, then), part in zip(values, steps, got.parts, strict=True)
                ]
                known = [share for share in shares if share is not None]
                if len(known) < len(shares) or max(known) - min(known) > 1e-2 * (1 - min(known)):
                    continue
                there = [x for x in values if x is not None]
                if not all(near(x, there[0], 1e-5) for x in there):
                    return [_found(context, got, name, there, 1 - known[0], later)]
    return []


def _found(
    context: Context, got: Got, name: str, values: Sequence[Tensor], share: float, later: Segment
) -> Finding:
    rank = got.ranks[0]
    said = (
        f"{name} moves by {share:.4g} of the way to {got.name} at each step, and {got.name} is the same on all ranks, "
        f"but {name} is not: {held_on(name, list(zip(got.ranks, values, strict=True)))}"
    )
    written = later.steps[rank][0].written.get(name, -1)
    at = context.place(rank, written if written >= 0 else context.segment.steps[rank][0].site)
    return finding("GM202", said, at, None, got.ranks, name, _REMEDY)


def _held(step: Step, name: str) -> Tensor | None:
    return step.frozen.get(name, step.buffers.get(name))


def _kept(before: Tensor | None, then: Tensor | None, to: Tensor | None) -> float | None:
    """How much is left of the way to another tensor after one step to it; None where that is not how it moves."""
    if before is None or then is None or to is None or not before.shape == then.shape == to.shape:
        return None
    way, left = (before - to).double().flatten(), (then - to).double().flatten()
    square = float(way @ way)
    if way.numel() < 4 or square == 0:
        return None
    kept = float(left @ way) / square
    moved = (1 - kept) * float(way.abs().max())
    rounding = 4e-7 * float(to.abs().max())
    exact = float((left - kept * way).abs().max()) <= 1e-2 * moved and moved > 10 * rounding
    return kept if exact and kept >= -1e-3 else None
