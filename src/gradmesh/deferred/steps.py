"""Optimizer steps while a sum is owed, which are refused."""

from __future__ import annotations

import threading
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradmesh.call_sites import show_site
from gradmesh.deferred.reductions import DeferredReductions
from gradmesh.errors import OrderError, message
from gradmesh.state import rank_state

__all__ = ["refuse_steps"]

_SHOWN = 5


class _RankReductions(list[DeferredReductions]):
    """Those of all threads of a rank."""


_lock = threading.Lock()
_hooked: list[object] = []


def refuse_steps(reductions: DeferredReductions) -> None:
    """Refuse optimizer steps of this rank while something is owed in a ledger."""
    with _lock:
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_refuse_if_deferred))
            # A closure's sums are put off within the step.
            _hooked.append(register_optimizer_step_post_hook(_refuse_if_deferred))
    state = rank_state()
    of_rank = state.get(_RankReductions) or _RankReductions()
    # Those of threads that have ended stay as long as there is something in them.
    state.put(
        _RankReductions(
            [*(one for one in of_rank if (one or one.open) and one is not reductions), reductions]
        )
    )


def _refuse_if_deferred(optimizer: Optimizer, *_: Any) -> None:
    of_rank = rank_state().get(_RankReductions)
    if not of_rank or not any(of_rank):
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    deferred = [
        entry for reductions in of_rank for entry in reductions.pending() if id(entry.leaf) in stepped
    ]
    if not deferred:
        return
    shown = [
        f"shape {list(entry.leaf.shape)}: {entry.op.verb} on axis {entry.op.axis} {show_site(entry.site)}"
        for entry in deferred[:_SHOWN]
    ]
    if len(deferred) > _SHOWN:
        shown.append(f"and {len(deferred) - _SHOWN} more")
    raise OrderError(
        message(
            "an optimizer steps while sums over the ranks are owed to its parameters",
            op="no_sync",
            expected="the sums taken, by the backward of a micro-batch whose forward ran outside of no_sync()",
            got="\n".join(shown),
            remedy="run the last micro-batch outside of the block; or `with gradmesh.no_sync() as owed:` and "
            "owed.sync() to take the sums now, owed.clear() to drop them",
        )
    )
