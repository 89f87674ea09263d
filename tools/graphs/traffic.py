"""The bytes of an exchange by the plan and of a whole gather, as they are counted where they are sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan
from gradmesh.verify import simulate, timeline
from gradmesh.verify.simulator.trace import Events
from tools.graphs.network import Crystal

_VERBS = {"plan": "neighbor_all_to_all", "gather": ("all_gather", "reduce_scatter")}


@dataclass(frozen=True)
class Sent:
    """What a rank sent."""

    rows: int  # the rows that others need of it
    remote: int  # the rows that it needs of others
    row_bytes: int  # the size of a row
    plan: tuple[int, ...]  # bytes of an exchange, forward, backward, and backward of these both
    gather: tuple[int, ...]  # bytes of a whole gather, forward and backward

    @property
    def expected(self) -> tuple[int, ...]:
        """Bytes of an exchange by its rows: own rows there, and the gradients of the remote ones back."""
        own, back = self.rows * self.row_bytes, self.remote * self.row_bytes
        return own, back, own + back


def counted(graph: Crystal, owner: Tensor, ranks: int, width: int, backend: str) -> list[Sent]:
    """What each rank sends of rows of float64.

    On threads it is counted from the tensors that a rank hands to each other in its process group, on other backends
    from the lengths that it tells its carrier.
    """
    args = (graph.edges, owner, width)
    if backend == "threads":
        run = simulate(_exchanges, ranks, args=args)
        return [_sent(run.events.select(rank=rank), *each) for rank, each in enumerate(run.results)]
    found = gm.launch(_watched, ranks, backend=backend, args=args)
    return [_sent(events, *each) for events, *each in found]


def _exchanges(edges: Tensor, owner: Tensor, width: int) -> tuple[int, int, int]:
    plan = GraphPlan(edges, owner)
    draw = torch.Generator().manual_seed(gm.rank())
    x = torch.randn(len(plan.own), width, dtype=torch.float64, generator=draw).requires_grad_()
    (slope,) = torch.autograd.grad((plan.exchange(x) ** 3).sum(), x, create_graph=True)
    torch.autograd.grad((slope**2).sum() * (1 + gm.rank()), x)
    torch.autograd.grad((plan.gather(x) ** 2).sum(), x)
    return plan.rows_sent, len(plan.remote), width * x.itemsize


def _watched(edges: Tensor, owner: Tensor, width: int) -> tuple[Events, int, int, int]:
    with timeline() as line:
        found = _exchanges(edges, owner, width)
    return line.events, *found


def _sent(events: Events, rows: int, remote: int, row_bytes: int) -> Sent:
    starts = [place for place, event in enumerate(events) if event.verb == _VERBS["plan"]]
    forward, backward, *second = [event.sent for event in events if event.verb == _VERBS["plan"]]
    # What comes before is the plan being made.
    gather = [event.sent for event in list(events)[starts[0] :] if event.verb in _VERBS["gather"]]
    return Sent(rows, remote, row_bytes, (forward, backward, sum(second)), tuple(gather))
