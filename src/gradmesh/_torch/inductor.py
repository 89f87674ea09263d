"""Makes Inductor keep the order of ops with an ordered effect."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils import _pytree as pytree

__all__ = ["keep_order_in_inductor"]

_LOWERING = "torch._inductor.lowering"
_kept: set[Any] = set()


def keep_order_in_inductor(op: Any) -> None:
    """Make Inductor, if it is imported, keep the order of calls of an op with an ordered effect.

    Up to torch 2.14 it stores that dependency under the name of the result but looks it up under the name of the call,
    so that it moves the calls. This stores it under the call's name too.
    """
    lowering: Any = sys.modules.get(_LOWERING)
    if op in _kept or lowering is None:
        return
    _kept.add(op)
    from torch._higher_order_ops import effects
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def lower(*args: Any, **kwargs: Any) -> Any:
        graph: Any = V.graph
        begin, before = len(graph.operations), graph.effectful_ops.get(effects._get_effect(op))
        made = ir.FallbackKernel.create(op, *args, **kwargs)
        if before is not None and hasattr(graph, "additional_star_deps"):
            for call in graph.operations[begin:]:
                graph.additional_star_deps[call.get_operation_name()].add(before.get_name())
        return pytree.tree_map(lambda x: ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x, made)

    lowering.register_lowering(op, type_promotion_kind=None)(lower)
