"""What `tools.audits` audits of `gradmesh.nn.graph`: plans in every way of making and of using them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.compat import fairchem
from gradmesh.nn.graph import GraphPlan, HeteroPlan

Build = Callable[..., tuple[Callable[..., Any], Tensor]]

_NODES, _WIDTH = 7, 2


def _owner(group: Any, parts: Any) -> Tensor:
    """Parts of the asked sizes; else uneven ones, whose nodes do not lie in order."""
    size = dist.get_world_size(group)
    if parts is not None:
        return torch.arange(size).repeat_interleave(torch.tensor(parts))
    return torch.arange(_NODES) % size


def _edges(nodes: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, max(nodes, 1), (2, 4 * nodes), generator=draw)


def _plan(group: Any, parts: Any, **given: Any) -> GraphPlan:
    owner = _owner(group, parts)
    return GraphPlan(_edges(len(owner)), owner, group, **given)


def _rebuilt(group: Any, parts: Any) -> GraphPlan:
    plan = _plan(group, parts)
    return plan.rebuilt(_edges(plan.nodes, 1))


def _from_root(group: Any, parts: Any) -> GraphPlan:
    if dist.get_rank(group):
        return GraphPlan(axis=group, root=0)
    return _plan(group, parts, root=0)


def _in_parts(group: Any, parts: Any) -> GraphPlan:
    owner, rank = _owner(group, parts), dist.get_rank(group)
    edges = _edges(len(owner))
    return GraphPlan(edges[:, owner[edges[1]] == rank], axis=group, own=(owner == rank).nonzero().squeeze(1))


def _of_plan(make: Callable[[Any, Any], GraphPlan], call: Callable[[GraphPlan, Tensor], Any]) -> Build:
    """Of a plan's own rows."""

    def build(group: Any = None, parts: Any = None) -> tuple[Callable[..., Any], Tensor]:
        plan = make(group or dist.group.WORLD, parts)
        return (lambda x: call(plan, x)), torch.rand(len(plan.own), _WIDTH) + 1

    return build


def _of_types(call: Callable[[HeteroPlan, Tensor], Any], hops: int) -> Build:
    def build(group: Any = None, parts: Any = None) -> tuple[Callable[..., Any], Tensor]:
        group = group or dist.group.WORLD
        owner = _owner(group, parts)
        edges = {("a", "to", "b"): _edges(len(owner)), ("b", "to", "a"): _edges(len(owner), 1)}
        plan = HeteroPlan(edges, {"a": owner, "b": owner.flip(0)}, group, hops=hops)
        return (lambda x: call(plan, x)), torch.rand(len(plan.rows["a"].own), _WIDTH) + 1

    return build


def _take(group: Any = None, parts: Any = None) -> tuple[Callable[..., Any], Tensor]:
    plan = _plan(group or dist.group.WORLD, parts)
    return plan.take, torch.rand(plan.nodes, _WIDTH) + 1


def _batch(plan: GraphPlan) -> Tensor:
    return plan.own % 2


def _layer(plan: GraphPlan, x: Tensor) -> Tensor:
    """Messages over interior edges while rows travel, then over the others."""
    source, target = plan.edge_index
    inside, outside = plan.interior, plan.boundary
    pending = plan.exchange(x, async_op=True)
    sums = plan.scatter_add(x[source[inside]] - x[target[inside]], inside)
    rows = pending.wait()
    return sums + plan.scatter_add(rows[source[outside]] - x[target[outside]], outside)


def _collect() -> tuple[Callable[..., Any], Tensor]:
    """The exchange under fairchem's names, of atoms that lie in no order, or of none on the last rank."""
    if fairchem.initialized():
        fairchem.cleanup_gp()
    fairchem.setup_graph_parallel_groups(dist.get_world_size(), "threads")
    rank, size = fairchem.get_gp_rank(), fairchem.get_gp_world_size()
    owner = torch.arange(_NODES) % size
    edges, own = _edges(_NODES), (owner == rank).nonzero().squeeze(1).flip(0)
    context = fairchem.build_gp_context(edges[:, owner[edges[1]] == rank], owner, rank, size, own)
    return (lambda x: fairchem.all_to_all_collect(x, context)), torch.rand(len(own), _WIDTH) + 1


def plans() -> dict[str, Build]:
    """Every call, with any sizes of the parts where they can be chosen."""

    def exchange(plan: GraphPlan, x: Tensor) -> Tensor:
        return plan.exchange(x)

    def of_types(plan: HeteroPlan, x: Tensor) -> Tensor:
        return plan.exchange({"a": x})["a"]

    def pending(plan: HeteroPlan, x: Tensor) -> Tensor:
        return plan.exchange({"a": x}, async_op=True).wait()["a"]

    return {
        "plan.exchange": _of_plan(_plan, exchange),
        "plan.exchange, hops=2": _of_plan(lambda g, p: _plan(g, p, hops=2), exchange),
        "plan.exchange, async_op=True": _of_plan(
            _plan, lambda plan, x: plan.exchange(x, async_op=True).wait()
        ),
        "plan.exchange, comm_dtype=float64": _of_plan(
            _plan, lambda plan, x: plan.exchange(x, comm_dtype=torch.float64)
        ),
        "plan.exchange, rebuilt": _of_plan(_rebuilt, exchange),
        "plan.exchange, of_state": _of_plan(
            lambda g, p: GraphPlan.of_state(_plan(g, p).state(), g), exchange
        ),
        "plan.exchange, root=0": _of_plan(_from_root, exchange),
        "plan.exchange, own=": _of_plan(_in_parts, exchange),
        "plan.take": _take,
        "plan.gather(dst=R)": _of_plan(_plan, lambda plan, x: plan.gather(x)),
        "plan.gather(dst=I)": _of_plan(_plan, lambda plan, x: plan.gather(x, dst=gm.I)),
        "plan.pool": _of_plan(_plan, lambda plan, x: plan.pool(x)),
        "plan.pool of a batch": _of_plan(_plan, lambda plan, x: plan.pool(x, _batch(plan), 2)),
        "a layer, overlapped": _of_plan(_plan, _layer),
        "HeteroPlan.exchange": _of_types(of_types, 1),
        "HeteroPlan.exchange, hops=2": _of_types(of_types, 2),
        "HeteroPlan.exchange, async_op=True": _of_types(pending, 1),
        "compat.fairchem.all_to_all_collect": _collect,
    }
