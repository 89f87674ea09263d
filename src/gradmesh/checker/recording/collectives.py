"""A collective as the dispatcher sees it, in one form for torch's two families of operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradmesh._torch.compilers import resolve_group
from gradmesh._torch.dispatched import arguments, group_behind, reduction_of
from gradmesh.checker.recording.tape import Verb
from gradmesh.type_inference.collectives import COLLECTIVES

__all__ = ["Call", "call_of"]


@dataclass(slots=True)
class Call:
    """A collective or a message before it is made.

    Attributes:
        kind: as `Sent` has it.
        ranks, name: of the group.
        ins: what is handed in.
        outs: where the result is written; None where the operator makes it.
        reduce, root, tag, splits, verb: as `Sent` has them.
    """

    kind: str
    ranks: tuple[int, ...]
    name: str
    ins: list[Tensor]
    outs: list[Tensor] | None
    reduce: str = ""
    root: int = -1
    tag: int = 0
    splits: tuple[list[int], list[int]] | None = None
    verb: Verb | None = None


def call_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """What an operator of torch's namespaces of collectives does; None for one that is not known."""
    name = func.overloadpacket.__name__
    raw = func.namespace == "c10d"
    known = COLLECTIVES[func.namespace].get(name)
    if known is None:
        return None
    kind, takes, writes = known
    bound = arguments(func, args, kwargs)
    if raw:
        group = group_behind(bound["process_group"])
        if group is None:
            return None
        ranks, label = tuple(dist.get_process_group_ranks(group)), group.group_name
        boxed = bound.get("reduce_op")
        reduce = "" if boxed is None else reduction_of(boxed)
    else:
        group = bound["group_name"]
        group = group if isinstance(group, dist.ProcessGroup) else resolve_group(group)
        ranks, label = tuple(dist.get_process_group_ranks(group)), group.group_name
        reduce = bound.get("reduce_op", "")
    call = Call(kind, ranks, label, _flat(bound.get(takes)), _flat(bound.get(writes)) if writes else None)
    call.reduce = reduce
    call.root = next((bound[key] for key in ("root_rank", "dst", "src") if key in bound), -1)
    call.tag = bound.get("tag", 0)
    if "output_split_sizes" in bound:
        call.splits = list(bound["output_split_sizes"]), list(bound["input_split_sizes"])
    if raw and call.outs is None:
        call.outs = []
    return call


def _flat(value: Any) -> list[Tensor]:
    if value is None:
        return []
    if isinstance(value, Tensor):
        return [value]
    return [each for part in value for each in _flat(part)]
