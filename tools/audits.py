"""Audit the collectives of gradmesh and of other libraries: python -m tools.report docs/reports/audits.md.

Of torch: `torch.distributed.nn.functional`; the functional collectives, of which the differentiable ones live in the
private module `torch.distributed._functional_collectives`; and DTensor's redistribute. `spmd_types` where it is
installed, see `benchmarks/requirements.txt`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

import gradmesh as gm
from benchmarks.systems.cases import CASES, ROOT
from benchmarks.systems.ours import GRADMESH
from benchmarks.systems.peers import DTENSOR, FUNCTIONAL, NN, SPMD_TYPES
from benchmarks.systems.system import Setting, System
from gradmesh.compat import fairchem, ksuit, megatron, torch_nn, towhee
from gradmesh.compat import gp_utils as gp
from gradmesh.nn.graph import GraphPlan, HeteroPlan
from gradmesh.verify import Audit, audit
from gradmesh.verify.auditing.findings import table as kinds_table
from tools.pages import show

Build = Callable[..., tuple[Callable[..., Any], Tensor]]


@dataclasses.dataclass(frozen=True)
class _At(Setting):
    """A setting with any sizes."""

    parts: tuple[int, ...] | None = None

    @property
    def even(self) -> bool:
        return self.parts is None

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.parts or (2, 2)

    def _amount(self, sender: int, receiver: int) -> int:
        return 2 if self.parts is None else max(0, self.parts[sender] - receiver)

    @property
    def sends(self) -> tuple[int, ...]:
        return tuple(self._amount(self.rank, other) for other in range(self.size))

    @property
    def receives(self) -> tuple[int, ...]:
        return tuple(self._amount(other, self.rank) for other in range(self.size))


_SHAPES: dict[str, Callable[[_At], tuple[int, ...]]] = {
    "part": lambda at: (at.sizes[at.rank], 3),
    "whole": lambda at: (sum(at.sizes), 3),
    "sends": lambda at: (sum(at.sends), 3),
    "at root": lambda at: (sum(at.sizes) if at.rank == at.root else 0, 3),
    "wide": lambda at: (at.sizes[at.rank], 4),
    "plain": lambda _: (2, 3),
}

_OPERAND = {
    "all_gather(dst=R)": "part",
    "all_gather(dst=I)": "part",
    "reduce_scatter": "whole",
    "reduce_scatter(op='mean')": "whole",
    "shard(src=I)": "whole",
    "shard(src=R)": "whole",
    "all_to_all": "sends",
    "all_to_all(split_dim=1)": "wide",
    "exchange": "sends",
    "gather": "part",
    "scatter": "at root",
    "halo_exchange": "part",
    "neighbor_all_to_all": "part",
}
"""What the operand of a case is, where it is not the same plain tensor on every rank."""

_ANY_PARTS: dict[str, Sequence[str]] = {
    "gradmesh": [name for name in _OPERAND if name != "neighbor_all_to_all"],
    NN.name: ["all_to_all"],
    FUNCTIONAL.name: ["all_to_all"],
    SPMD_TYPES.name: ["all_gather(dst=R)", "all_gather(dst=I)", "reduce_scatter", "all_to_all"],
}
"""The cases that a system takes any sizes for; DTensor takes those of torch.chunk alone."""


def _of_system(system: System, case: str) -> Build:
    shape = _SHAPES[_OPERAND.get(case, "plain")]

    def build(group: Any = None, parts: Any = None) -> tuple[Callable[..., Any], Tensor]:
        group = group or dist.group.WORLD
        at = _At(group, dist.get_rank(group), "even", None if parts is None else tuple(parts))
        call = system.verbs[case](at)
        if CASES[case].at_root and at.rank != ROOT:  # what others than the root get is not defined
            return (lambda x: 0 * call(x)), torch.rand(shape(at)) + 1
        return call, torch.rand(shape(at)) + 1

    if case in _ANY_PARTS.get(system.name, ()):
        return build
    return lambda group=None: build(group)


SYSTEMS: dict[str, dict[str, Build]] = {
    system.name: {case: _of_system(system, case) for case in system.verbs}
    for system in (GRADMESH, NN, FUNCTIONAL, DTENSOR, SPMD_TYPES)
}
"""For each system, its calls."""


def drop_ins() -> dict[str, Build]:
    """Every drop-in."""
    return {**_graph_parallel(), **_megatron(), **_torch_nn(), **_others()}


def _in_gp(call: Callable[[Tensor], Any], shape: tuple[int, ...]) -> Build:
    """A function of a graph-parallel module, which keeps its groups itself."""

    def build() -> tuple[Callable[..., Any], Tensor]:
        if gp.initialized():
            gp.cleanup_gp()
        gp.setup_gp({"gp_gpus": dist.get_world_size(), "distributed_backend": "threads"})
        return call, torch.rand(shape) + 1

    return build


def _graph_parallel() -> dict[str, Build]:
    atoms = 4
    calls: Mapping[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
        "gp_utils.copy_to_model_parallel_region": (gp.copy_to_model_parallel_region, (3, 2)),
        "gp_utils.reduce_from_model_parallel_region": (gp.reduce_from_model_parallel_region, (3, 2)),
        "gp_utils.scatter_to_model_parallel_region": (
            lambda x: gp.scatter_to_model_parallel_region(x, 0),
            (5, 2),
        ),
        "gp_utils.gather_from_model_parallel_region": (
            lambda x: gp.gather_from_model_parallel_region(x, 0),
            (3, 2),
        ),
        "gp_utils.gather_from_model_parallel_region_sum_grad": (
            lambda x: gp.gather_from_model_parallel_region_sum_grad(x, 0),
            (3, 2),
        ),
        "fairchem.reduce_from_model_parallel_region": (fairchem.reduce_from_model_parallel_region, (3, 2)),
        "fairchem.all_reduce_sum_with_grad": (fairchem.all_reduce_sum_with_grad, (3, 2)),
        "fairchem.scatter_to_model_parallel_region": (fairchem.scatter_to_model_parallel_region, (5, 2)),
        "fairchem.gather_from_model_parallel_region": (
            lambda x: fairchem.gather_from_model_parallel_region(x, atoms),
            (2, 2),
        ),
        "fairchem.gather_from_model_parallel_region_sum_grad": (
            lambda x: fairchem.gather_from_model_parallel_region_sum_grad(x, atoms),
            (2, 2),
        ),
        "fairchem.GatherFromModelParallelRegionGradPadded": (
            fairchem.GatherFromModelParallelRegionGradPadded.apply,
            (2, 2),
        ),
        "fairchem.GatherFromModelParallelRegionSumGradPadded": (
            fairchem.GatherFromModelParallelRegionSumGradPadded.apply,
            (2, 2),
        ),
    }
    return {name: _in_gp(call, shape) for name, (call, shape) in calls.items()}


def _in_group(call: Callable[[Tensor, Any], Any], shape: tuple[int, ...]) -> Build:
    def build(group: Any = None) -> tuple[Callable[..., Any], Tensor]:
        group = group or dist.group.WORLD
        return (lambda x: call(x, group)), torch.rand(shape) + 1

    return build


def _megatron() -> dict[str, Build]:
    plain, tall, wide = (3, 2), (4, 3), (3, 4)
    shapes: Mapping[str, tuple[int, ...]] = {
        "copy_to_tensor_model_parallel_region": plain,
        "reduce_from_tensor_model_parallel_region": plain,
        "scatter_to_tensor_model_parallel_region": wide,
        "gather_from_tensor_model_parallel_region": plain,
        "scatter_to_sequence_parallel_region": tall,
        "reduce_scatter_to_sequence_parallel_region": tall,
        "all_gather_last_dim_from_tensor_parallel_region": plain,
        "reduce_scatter_last_dim_to_tensor_parallel_region": wide,
        "all_to_all_sp2hp": wide,
        "all_to_all_hp2sp": tall,
    }
    builds = {f"megatron.{name}": _in_group(getattr(megatron, name), shape) for name, shape in shapes.items()}
    gather = megatron.gather_from_sequence_parallel_region
    builds["megatron.gather_from_sequence_parallel_region"] = _in_group(
        lambda x, g: gather(x, group=g), plain
    )
    builds["megatron.gather_from_sequence_parallel_region(x, False)"] = _in_group(
        lambda x, g: gather(x, False, g), plain
    )
    builds["megatron.all_to_all"] = _in_group(lambda x, g: megatron.all_to_all(g, x), tall)
    return builds


def _torch_nn() -> dict[str, Build]:
    nn = torch_nn

    def root(group: Any) -> int:
        return dist.get_global_rank(group, ROOT)

    def reduced(verb: str, op: Any, x: Tensor, g: Any) -> Tensor:
        if verb == "all_reduce":
            return nn.all_reduce(x, op, g)
        if verb == "reduce":
            return nn.reduce(x, root(g), op, g)
        return nn.reduce_scatter(x.new_empty(2, 2), list(x.unbind(0)), op, g)

    calls: dict[str, tuple[Callable[[Tensor, Any], Any], tuple[int, ...]]] = {
        "all_gather": (nn.all_gather, (3, 2)),
        "all_to_all": (
            lambda x, g: nn.all_to_all(list(torch.empty_like(x)), list(x.unbind(0)), g),
            (2, 2, 2),
        ),
        "all_to_all_single": (lambda x, g: nn.all_to_all_single(torch.empty_like(x), x, group=g), (4, 2)),
        "broadcast": (lambda x, g: nn.broadcast(x, root(g), g), (3, 2)),
        "gather": (lambda x, g: nn.gather(x, root(g), g), (3, 2)),
        "scatter": (lambda x, g: nn.scatter(list(x.unbind(0)), root(g), g), (2, 2, 2)),
    }
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        calls |= {
            f"{verb}(op={name})": (partial(reduced, verb, getattr(ReduceOp, name)), shape)
            for verb, shape in (("all_reduce", (3, 2)), ("reduce", (3, 2)), ("reduce_scatter", (2, 2, 2)))
        }
    return {f"torch_nn.{name}": _in_group(call, shape) for name, (call, shape) in calls.items()}


def _others() -> dict[str, Build]:
    def towhee_build(group: Any = None, local_rank: int = 0) -> tuple[Callable[..., Any], Tensor]:
        place: Any = group or dist.group.WORLD

        class Args:
            world_size = place.size()

        Args.local_rank = local_rank  # type: ignore[attr-defined]
        return (lambda x: towhee.AllGather.apply(x, Args, group)), torch.rand(3, 2)

    return {
        "ksuit.AllGatherGradAutograd": lambda: (ksuit.AllGatherGradAutograd.apply, torch.rand(3, 2)),
        "towhee.AllGather": towhee_build,
    }


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


_HEAD = """# Audits of collectives: gradmesh, torch.distributed, DTensor and others

What `gm.verify.audit` finds in the collectives of gradmesh and of other libraries, and what each kind of finding means.
`audit` runs a collective, `autograd.Function` or layer on a few ranks (threads of one process) and reports for which
types its backward is the adjoint of its forward, and which faults it has:

```python
import torch
import torch.distributed as dist
import gradmesh as gm

class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad)
        return grad

def build():
    return Sum.apply, torch.randn(4, 3)

found = gm.verify.audit(build)
print(found.arrows)
print(found.kinds[0], found.findings[0].ranks)
```

```text
('P -> R',)
gradient-overwritten (0, 1, 2)
```

`build` may accept `group=`, `parts=` and `local_rank=`. `arrow="P -> R"` checks one intended pair of types. On the
command line, `gradmesh audit module:build` prints the full report; its exit status is 0 without errors and warnings, 1
with one, and 2 if the function could not be audited.

An arrow such as `V -> R` gives the [types](../types.md) of operand and result: here the operand varies over the ranks,
and the result is the same on each rank, which uses it differently. Arrows that follow from stronger ones are left out.

## Kinds of findings
"""

_RESULTS = """
## Findings

torch {torch}, Python {python}, {cores} cores, 2 ranks on threads, in float64, {seconds:.0f} s in all. Written by

```console
$ python -m tools.report docs/reports/audits.md
```

Each call is made as its documentation says, see `benchmarks/systems/peers.py`; results that only the root has are
judged on the root. The functional collectives with a backward are in a private module of torch,
`torch.distributed._functional_collectives`. `unused-output` is tested inside `gm.ordered()`, which has no effect on raw
collectives. Subgroups consist of ranks 1 and 2 of three.
"""


def audits(timeout: float = 20.0) -> dict[str, dict[str, Audit | str]]:
    """For each system, what is found of each of its calls, or why it could not be audited."""
    systems = {
        "gradmesh": SYSTEMS["gradmesh"],
        "gradmesh.nn.graph, the plans": plans(),
        "gradmesh.compat, the drop-ins": drop_ins(),
        **SYSTEMS,
    }
    found: dict[str, dict[str, Audit | str]] = {}
    for name, calls in systems.items():
        if name in found or (name == "spmd_types" and importlib.util.find_spec(name) is None):
            continue
        found[name] = {}
        for call, build in calls.items():
            found[name][call] = _one(build, timeout)
            print(f"{name:32} {call:56} {_short(found[name][call])}", file=sys.stderr, flush=True)
    return found


def _one(build: Build, timeout: float) -> Audit | str:
    try:
        return audit(build, world_size=2, timeout=timeout)
    except gm.GradmeshError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        reason = next(
            (line.removeprefix("got").strip() for line in lines if line.startswith("got")), lines[0]
        )
        return reason.rpartition(", at ")[0] or reason


def _short(found: Audit | str) -> str:
    if isinstance(found, str):
        return f"raises: {found}"
    return f"{'; '.join(found.arrows)} | {', '.join(found.kinds) or 'none'} | {found.seconds:.1f} s"


def page(found: dict[str, dict[str, Audit | str]], seconds: float) -> str:
    """The page, with what was found."""
    head = _RESULTS.format(
        torch=torch.__version__,
        python=platform.python_version(),
        cores=torch.get_num_threads(),
        seconds=seconds,
    )
    lines = [_HEAD, kinds_table(), head]
    for name, calls in found.items():
        clean = sum(isinstance(each, Audit) and each.ok for each in calls.values())
        lines += [f"### {name}: {clean} of {len(calls)} without a finding", ""]
        lines += ["| call | backward is the adjoint for | findings |", "|---|---|---|", *_rows(calls), ""]
    return "\n".join(lines)


def _rows(calls: dict[str, Audit | str]) -> list[str]:
    rows = []
    for call, each in calls.items():
        if isinstance(each, str):
            rows.append(f"| `{call}` | | raises: {each.replace('|', '/')[:160]} |")
            continue
        kinds = ", ".join(f"`{kind}`" for kind in each.kinds) or "none"
        rows.append(f"| `{call}` | {'; '.join(each.arrows) or 'none'} | {kinds} |")
    return rows


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Audit everything; the exit status says whether something of gradmesh has a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that one question may take")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    began = time.monotonic()
    found = audits(options.timeout)
    text = page(found, time.monotonic() - began)
    show(text, into)
    own = [each for name, calls in found.items() if name.startswith("gradmesh") for each in calls.values()]
    return int(not all(isinstance(each, Audit) and each.ok for each in own))


if __name__ == "__main__":
    sys.exit(main())
