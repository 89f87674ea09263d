"""Whether a program is right: beside one process, beside what it was before, by differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tools.check_attack.programs import SHARDED, Program
from tools.check_attack.ranks import Ran, differences, trained

SAME, APART = 1e-3, 2e-2
"""Two gradients are the same below the one, and differ above the other; between the two nothing is said."""

Truth = str
"""What a changed program is: "wrong: ..." , "right", or "open: ..." where either may be said of it."""


@dataclass
class Reference:
    """A right program, run."""

    runs: list[Ran]  # of its ranks
    kinds: list[list[int]]  # for each parameter the number of the part that each rank has
    parted: bool  # whether ranks have other parts of it between the steps


def reference_of(program: Program, path: Path) -> Reference | str:
    """Run a program, and prove that it is right; else what is not.

    One process has all rows, all tokens and all shards: what it computes is what the ranks have to compute together.
    """
    dense, runs = trained(path, 1, _by_values(program)), trained(path, program.ranks, _by_values(program))
    if dense is None or runs is None:
        return "it gets stuck"
    errors = [run.error for run in (*dense, *runs) if run.error]
    if errors:
        return errors[0]
    kinds, parts = _layout(program, dense[0].values[0], runs)
    reference = Reference(runs, kinds, program.sync == "fsdp2")
    if _drifted(reference, runs):
        return "its copies part"
    if program.random:
        if program.optimizer.startswith("manual"):
            return reference
        found = differences(path, program.ranks, kinds)
        return reference if found is not None and _is_multiple(found) else f"differences say {found}"
    steps = len(runs[0].gradients)
    if any(len(run.gradients) != steps or steps != len(dense[0].gradients) for run in runs) or not steps:
        return f"it has {steps} steps, and {len(dense[0].gradients)} in one process"
    for step in range(steps):
        expected = [
            [parts(x, at, rank) for at, x in enumerate(dense[0].gradients[step])] for rank in range(len(runs))
        ]
        factor, apart = _compared([run.gradients[step] for run in runs], expected, _rounding(program))
        if apart > SAME:
            return f"step {step}: {apart:.2g} from one process, with a factor of {factor:.4g}"
        if abs(factor - 1) > 1e-3:
            break  # its next step is taken elsewhere
    return reference


def truth_of(program: Program, reference: Reference, path: Path) -> Truth:
    """What a changed program is."""
    runs = trained(path, program.ranks, _by_values(program))
    if runs is None:
        return "wrong: it gets stuck"
    if any(run.error for run in runs):
        return "wrong: it raises"
    if _drifted(reference, runs):
        return "wrong: its copies part"
    before = reference.runs
    if len({len(run.gradients) for run in (*runs, *before)}) > 1:
        return "open: it takes other steps"
    for step in range(len(before[0].gradients)):
        factor, apart = _compared(
            [run.gradients[step] for run in runs], [run.gradients[step] for run in before], _rounding(program)
        )
        if apart < SAME and abs(factor - 1) < 1e-3:
            continue
        if apart < SAME:
            return f"open: a factor of {factor:.3g}"
        if apart < APART:
            return "open: too little"
        same = all(
            _same_losses(a.losses, b.losses, step, len(before[0].gradients))
            for a, b in zip(runs, before, strict=True)
        )
        if same:
            return f"wrong: {apart:.2g} from what it was"
        if step or _by_values(program) or program.deliberate or program.has("clip_value"):
            return "open: another objective"
        found = differences(path, program.ranks, reference.kinds)
        if found is None:
            return "open: it cannot be differentiated"
        given = [any(run.gradients[0][at] is not None for run in before) for at in range(len(found))]
        found = [each for each, there in zip(found, given, strict=True) if there]
        return "open: right for another objective" if _is_multiple(found) else "wrong: by differences"
    # Behind clipping a factor is gone, of which the checker may speak.
    return "open: clipped to the same" if program.clip else "right"


def _layout(program: Program, whole: Sequence[Tensor], runs: Sequence[Ran]):  # type: ignore[no-untyped-def]
    """Which part of each parameter each rank has, and how to take it."""
    tp, ranks = program.tp, range(len(runs))
    cuts: list[tuple[int, int] | None] = []
    kinds = []
    for at, x in enumerate(whole):
        mine = runs[0].values[0][at]
        dims = [d for d in range(x.dim()) if x.shape[d] != mine.shape[d]] if x.shape != mine.shape else []
        if not dims or program.sync == "fsdp2":
            cuts.append(None)
            kinds.append([0 for _ in ranks])
            continue
        count = x.shape[dims[0]] // mine.shape[dims[0]]
        experts = x.dim() == 3
        cuts.append((dims[0], count))
        kinds.append([rank // tp if experts else rank % tp for rank in ranks])

    def part(x: Tensor | None, at: int, rank: int) -> Tensor | None:
        cut = cuts[at]
        return x if x is None or cut is None else x.chunk(cut[1], cut[0])[kinds[at][rank]]

    return kinds, part


def _drifted(reference: Reference, runs: Sequence[Ran]) -> bool:
    """Whether ranks that had copies of a parameter have others, at the beginning or in the end."""
    if reference.parted:
        return False
    for when in (0, 1):
        for at, kind in enumerate(reference.kinds):
            values = [run.values[when][at] for run in runs]
            for rank, part in enumerate(kind):
                first = values[kind.index(part)]
                far = 1e-4 * (float(first.abs().max()) + 1e-6)
                if not float((values[rank] - first).abs().max()) < far:
                    return True
    return False


def _rounding(program: Program) -> float:
    """Of what is known as a difference of parameters alone."""
    return 3e-7 if _by_values(program) else 0.0


def _by_values(program: Program) -> bool:
    """Whether gradients are known as differences of parameters: no optimizer has all parameters of a rank."""
    return program.optimizer.startswith("manual") or program.sync in SHARDED


def _compared(
    given: Sequence[Sequence[Tensor | None]],
    true: Sequence[Sequence[Tensor | None]],
    rounding: float,
) -> tuple[float, float]:
    """The factor between two sets of gradients, and how far they are from each other but for it."""
    pairs = [
        (torch.zeros_like(y) if x is None else x.double(), torch.zeros_like(x) if y is None else y.double())  # type: ignore[arg-type]
        for xs, ys in zip(given, true, strict=True)
        for x, y in zip(xs, ys, strict=True)
        if x is not None or y is not None
    ]
    square = sum(float((y * y).sum()) for _, y in pairs)
    factor = sum(float((x * y).sum()) for x, y in pairs) / square if square else 1.0
    # Once more along the parameters that agree best: one that is wrong shall not bend the factor of the others.
    ratios = sorted(
        float((x * y).sum()) / float((y * y).sum()) for x, y in pairs if float((y * y).sum()) > 1e-8 * square
    )
    largest = max(float(y.abs().max()) for _, y in pairs if y.numel())
    best = float("inf"), factor
    for each in {factor, *ratios[:: max(1, len(ratios) // 8)]}:
        far = max(
            (float((x - each * y).abs().max()) - rounding)
            / max(float((each * y).abs().max()), 1e-3 * abs(each) * largest, 1e-12)
            for x, y in pairs
            if x.numel()
        )
        best = min(best, (far, each))
    return best[1], best[0]


def _same_losses(a: Sequence[float], b: Sequence[float], step: int, steps: int) -> bool:
    if len(a) != len(b) or not a:
        return False
    each = len(a) // steps
    mine, other = a[step * each : (step + 1) * each], b[step * each : (step + 1) * each]
    return all(abs(x - y) <= 1e-4 * abs(y) + 1e-7 for x, y in zip(mine, other, strict=True))


def _is_multiple(found: Sequence[tuple[float, list[float]]]) -> bool:
    """Whether all gradients are the same multiple of the true ones."""
    largest = max((abs(true) for true, _ in found), default=0.0)
    small = 1e-3 * largest + 1e-7
    factors = [each / true for true, said in found for each in said if abs(true) > small]
    if not factors:
        return False
    flat = [abs(each) for true, said in found for each in said if abs(true) <= small]
    return all(abs(f / (factors[0] or 1e-30) - 1) < 1e-2 for f in factors) and all(
        each <= 20 * small * abs(factors[0]) for each in flat
    )
