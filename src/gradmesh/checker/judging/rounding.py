"""Gradients that are nothing but rounding: they differ, and nothing is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradmesh.checker.judging.context import Context
from gradmesh.checker.judging.parameters import Got
from gradmesh.checker.judging.truth import truth_of
from gradmesh.checker.replay.engine import UnfaithfulError, run_again

__all__ = ["forgive_rounding"]

_MARGIN = 30.0
"""How much further than a change of its parameters' last bits takes it a gradient may be from the true one."""


def forgive_rounding(context: Context, wrong: Sequence[Got]) -> bool:
    """Take those that are as near to the true gradient as rounding lets them be for unused; whether there are any.

    What a norm takes away, the scale in front of a batch norm for one, leaves a gradient of parts that nearly cancel.
    How far rounding carries is seen where the ranks are run again with the last bits of all parameters changed.
    """
    try:
        shaken = truth_of(run_again(context.segment.parts, shaken=True))
    except (UnfaithfulError, RuntimeError):
        return False
    if shaken is None:
        return False
    forgiven = False
    for got in (
        got for got in wrong if got.kind in ("apart", "bent")
    ):  # a multiple of the true one is not a rounding error
        reach = 0.0
        for part in got.parts:
            others = [shaken.gradients[part.rank].get(number) for number in part.ids]
            there = [x for x in others if x is not None]
            if part.true is not None and there and all(x.shape == part.true.shape for x in there):
                moved = torch.stack(there).sum(0) - part.true
                reach = max(reach, float(moved.abs().max()) if moved.numel() else 0.0)
        far = max(float((x - context.expected * got.true).abs().max()) if x.numel() else 0.0 for x in got.got)
        if far <= _MARGIN * reach:
            got.kind = "unused"
            forgiven = True
    return forgiven
