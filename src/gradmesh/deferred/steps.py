"""Raise on optimizer steps while gradient reductions are deferred."""

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
    """The deferred reductions of all threads of a rank."""


_lock = threading.Lock()
_hooked: list[object] = []


def refuse_steps(reductions: DeferredReductions) -> None:
    """Raise on optimizer steps of this rank while reductions are pending."""
    with _lock:
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_refuse_if_deferred))
            # The closure of an optimizer may defer reductions within the step.
            _hooked.append(register_optimizer_step_post_hook(_refuse_if_deferred))
    state = rank_state()
    of_rank = state.get(_RankReductions) or _RankReductions()
    # Those of finished threads stay until they are empty.
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
            "optimizer.step() called with deferred gradient reductions pending",
            op="no_sync",
            expected="a last micro-batch whose forward runs outside of no_sync(), before optimizer.step()",
            got="\n".join(shown),
            remedy="run the last micro-batch outside of the block; or use `with gradmesh.no_sync() as deferred:` and "
            "call deferred.sync() to reduce now, or deferred.clear() to drop the gradients",
        )
    )
