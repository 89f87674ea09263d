"""Verbs beside RPC: stages that hold collectives, distributed autograd and its optimizer, and futures of both kinds."""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd
from torch import Tensor, nn
from torch.distributed import rpc

import gradmesh as gm
from tests.conftest import Worlds

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not rpc.is_available(), reason="torch is built without RPC"),
]
Processes = Callable[[int], Callable[..., list[Any]]]
dist_autograd: Any = torch.distributed.autograd
WORKERS, STEPS, ROWS = 2, 3, 6


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@contextlib.contextmanager
def rpc_world(path: str) -> Iterator[None]:
    """RPC among all ranks; shut down when every rank is done."""
    rank, size = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=30)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    try:
        yield
    finally:
        rpc.shutdown()


def on_ranks(run: Callable[..., list[Any]], program: Callable[..., Any], path: Path) -> list[Any]:
    """The results of the ranks, or a skip where RPC does not start."""
    results = run(started, program, str(path / "rendezvous"))
    for result in results:
        if isinstance(result, str):
            pytest.skip(f"RPC does not start here: {result}")
    return results


def started(program: Callable[..., Any], path: str) -> Any:
    group = dist.new_group(list(range(WORKERS)))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(rpc_world(path))
        except RuntimeError as error:
            return str(error)
        try:
            return program(group)
        finally:
            dist.barrier()  # no rank leaves while another one still asks
            STAGES.clear()


# ---- Verbs on the side that asks -------------------------------------------------------------------------------------


def remote_layer(y: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(y @ w)


def asks_a_peer(_: object) -> tuple[Tensor, Tensor]:
    """Gather rows, send them through a layer on the other rank, and reduce what comes back."""
    rank = gm.axis().rank
    x, w = drawn(3 + rank, 2, 3).requires_grad_(), drawn(5 + rank, 3, 3).requires_grad_()
    with dist_autograd.context() as context:
        y = gm.all_gather(x)
        z = rpc.rpc_sync(f"rank{1 - rank}", remote_layer, (y, w))
        loss = (1 + rank) * (gm.reduce_scatter(gm.convert(z, src=gm.V, dst=gm.P)) ** 2).sum()
        dist_autograd.backward(context, [loss])
        found = dist_autograd.get_gradients(context)
        assert x.grad is None
        return found[x].clone(), found[w].clone()


def test_verbs_on_both_sides_of_a_call(processes: Processes, tmp_path: Path) -> None:
    results = on_ranks(processes(WORKERS), asks_a_peer, tmp_path)
    xs = [drawn(3 + rank, 2, 3).requires_grad_() for rank in range(WORKERS)]
    ws = [drawn(5 + rank, 3, 3).requires_grad_() for rank in range(WORKERS)]
    y = torch.cat(xs)
    parts = torch.stack([remote_layer(y, w) for w in ws]).sum(0).split(2)
    torch.stack([(1 + rank) * (part**2).sum() for rank, part in enumerate(parts)]).sum().backward()
    for x, w, (x_grad, w_grad) in zip(xs, ws, results, strict=True):
        assert x.grad is not None
        assert w.grad is not None
        close(x_grad, x.grad)
        close(w_grad, w.grad)


VERBS: dict[str, Callable[[Tensor], Tensor]] = {
    "gather and slice": lambda y: gm.reduce_scatter(gm.all_gather(y) * (1 + gm.rank())),
    "shift": lambda y: gm.shift(y),
    "exchange": lambda y: gm.all_to_all(y),
    "scan": lambda y: gm.scan(y),
    "mean": lambda y: y - gm.all_reduce(y, op="mean", dst=gm.R).mean(0),
}


def at_random(seed: int, remote: bool) -> tuple[Tensor, Tensor]:
    """Verbs and layers in some order, each layer on this rank or asked of the other; a rank may have no loss."""
    draw, rank = random.Random(seed), gm.rank()
    x, w = drawn(30 + rank, 2, 3).requires_grad_(), drawn(40 + rank, 3, 3).requires_grad_()
    silent, asked = draw.choice([None, 0, 1]), False
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(dist_autograd.context()) if remote else None
        with gm.ordered():
            y = x * 1
            for _ in range(draw.choice([1, 2, 3, 4])):
                y, asked = VERBS[draw.choice(sorted(VERBS))](y), draw.random() < 0.7
                if asked:
                    y = (
                        rpc.rpc_sync(f"rank{1 - rank}", remote_layer, (y, w))
                        if remote
                        else remote_layer(y, w)
                    )
            loss: Tensor | None = ((1 + rank) * y**2).sum() + (w**2).sum()
            if rank == silent:
                # Distributed autograd waits for the gradient of whatever was sent, so that must be used.
                loss = 0 * y.sum() if asked else None
            loss = gm.join(loss)
        if context is None:
            loss.backward()
            found = {leaf: leaf.grad for leaf in (x, w)}
        else:
            dist_autograd.backward(context, [loss])
            found = dist_autograd.get_gradients(context)
        none = torch.zeros(())
        x_grad, w_grad = ((found.get(leaf) if found.get(leaf) is not None else none) for leaf in (x, w))
        assert x_grad is not None
        assert w_grad is not None
        return x_grad.clone(), w_grad.clone()


def many_at_random(_: object) -> list[tuple[Tensor, Tensor]]:
    return [at_random(seed, True) for seed in range(12)]


def test_random_programs_have_the_gradients_they_have_without_rpc(worlds: Worlds, tmp_path: Path) -> None:
    results = on_ranks(worlds(WORKERS, "gloo", 240).run, many_at_random, tmp_path)
    for seed in range(12):
        right = gm.launch(at_random, WORKERS, backend="threads", args=(seed, False))
        for found, want in zip([each[seed] for each in results], right, strict=True):
            close(found[0], want[0])
            close(found[1], want[1])


# ---- Verbs inside a stage that is asked ------------------------------------------------------------------------------

STAGES: list[dist.ProcessGroup] = []
"""Over which ranks the stages of this process talk."""


class Stage(nn.Module):
    """A layer, centred over the rows of all ranks that hold it, and another one."""

    def __init__(self, mean: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(drawn(seed, 4, 4) / 2) for seed in (21, 22))
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.up
        part = hidden.sum(0) / ROWS
        mean = part if self.mean is None else self.mean(part)
        return torch.tanh(hidden - mean) @ self.down


def over_workers(part: Tensor) -> Tensor:
    return gm.all_reduce(part, STAGES[0], dst=gm.R)


def stage() -> Stage:
    """A stage, on the rank that is asked for one."""
    return Stage(over_workers)


def asked_for(kept: rpc.RRef[Any], x: Tensor) -> Tensor:
    """What a stage of this rank makes of rows."""
    made: Tensor = kept.local_value()(x)
    return made


def parameters_of(kept: rpc.RRef[Any]) -> list[rpc.RRef[Any]]:
    return [rpc.RRef(parameter) for parameter in kept.local_value().parameters()]


def values_of(kept: rpc.RRef[Any]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in kept.local_value().parameters()]


def batch(step: int) -> Tensor:
    return drawn(step, ROWS, 4)


def loss_of(y: Tensor, head: Tensor) -> Tensor:
    """Each row is compared with the next one, which may be another worker's."""
    return ((y @ head) * y.roll(1, 0)).sum().square() / ROWS + (y**3).mean()


def drives(group: dist.ProcessGroup) -> tuple[list[Tensor], Tensor, list[float]] | None:
    """The last rank drives stages that the others hold."""
    STAGES.append(group)
    dist.barrier()
    if dist.get_rank() < WORKERS:
        return None
    from torch.distributed.optim import (
        DistributedOptimizer,
    )  # in the rank, as it warns of its own use of TorchScript

    names = [f"rank{rank}" for rank in range(WORKERS)]
    stages = [rpc.remote(name, stage) for name in names]
    head = nn.Parameter(drawn(23, 4, 4))
    references = [
        rpc.rpc_sync(name, parameters_of, (kept,)) for name, kept in zip(names, stages, strict=True)
    ]
    every = [rpc.RRef(head), *(each for some in references for each in some)]
    optimizer = DistributedOptimizer(torch.optim.SGD, every, lr=0.05)
    losses = []
    for step in range(STEPS):
        with dist_autograd.context() as context:
            parts = batch(step).split((4, 2))
            asked = [
                rpc.rpc_async(kept.owner(), asked_for, (kept, part))
                for kept, part in zip(stages, parts, strict=True)
            ]
            y = torch.cat([each.value() for each in torch.futures.collect_all(asked).wait()])
            loss = loss_of(y, head)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
            losses.append(loss.item())
    found = [rpc.rpc_sync(name, values_of, (kept,)) for name, kept in zip(names, stages, strict=True)]
    return [value for some in found for value in some], head.detach(), losses


def test_a_stage_that_holds_a_collective_trains_as_one_process(worlds: Worlds, tmp_path: Path) -> None:
    """Each worker's copy of the weights gets its own share of the gradient, which distributed autograd brings home."""
    *_, found = on_ranks(worlds(WORKERS + 1, "gloo", 240).run, drives, tmp_path)
    copies, head = [Stage() for _ in range(WORKERS)], nn.Parameter(drawn(23, 4, 4))
    optimizer = torch.optim.SGD([head, *(p for each in copies for p in each.parameters())], lr=0.05)
    losses = []
    for step in range(STEPS):
        parts = batch(step).split((4, 2))
        hidden = [part @ each.up for part, each in zip(parts, copies, strict=True)]
        mean = torch.stack([part.sum(0) / ROWS for part in hidden]).sum(0)
        y = torch.cat([torch.tanh(h - mean) @ each.down for h, each in zip(hidden, copies, strict=True)])
        loss = loss_of(y, head)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    values, found_head, reported = found
    assert reported == pytest.approx(losses, rel=1e-12)
    assert losses[0] != pytest.approx(losses[-1], rel=1e-3)
    close(found_head, head.detach())
    for got, want in zip(values, [p for each in copies for p in each.parameters()], strict=True):
        close(got, want.detach())


# ---- Futures ---------------------------------------------------------------------------------------------------------


def awaits_both(_: object) -> tuple[list[float], list[float]]:
    """A remote call and a collective are under way at once, and both are futures."""
    rank = gm.axis().rank
    x = torch.tensor([1.0 + rank, 2.0])
    with gm.check(0):
        pending = gm.all_gather(x, async_op=True)
        asked = rpc.rpc_async(f"rank{1 - rank}", torch.add, (x, 10))
        doubled = pending.future().then(lambda done: done.value() * 2)
        futures: list[torch.futures.Future[Tensor]] = [asked.then(lambda done: -done.value()), doubled]
        together = [each.value().tolist() for each in torch.futures.collect_all(futures).wait()]
        more = [gm.shift(x, async_op=True), gm.all_reduce(x, dst=gm.I, async_op=True)]
        shifted, total = torch.futures.wait_all([*(each.future() for each in more)])
        for each in (pending, *more):
            each.wait()
    return together, [*shifted.tolist(), *total.tolist()]


def test_a_remote_call_and_a_collective_are_awaited_together(processes: Processes, tmp_path: Path) -> None:
    first, second = on_ranks(processes(WORKERS), awaits_both, tmp_path)
    gathered = [2.0, 4.0, 4.0, 4.0]
    assert first == ([[-11.0, -12.0], gathered], [2.0, 2.0, 3.0, 4.0])
    assert second == ([[-12.0, -12.0], gathered], [1.0, 2.0, 3.0, 4.0])


def awaits_a_failure(_: object) -> list[str]:
    """A remote call that fails, beside a collective that does not."""
    rank = gm.axis().rank
    pending = gm.all_gather(torch.ones(1), async_op=True)
    asked = rpc.rpc_async(f"rank{1 - rank}", torch.reshape, (torch.ones(3), (2,)))
    reported = []
    for wait in (lambda: torch.futures.wait_all([asked, pending.future()]), lambda: asked.then(abs).wait()):
        try:
            wait()
        except RuntimeError as error:
            reported.append(str(error))
    return [*reported, str(pending.wait().tolist())]


def test_the_error_of_a_remote_call_leaves_the_collective_alone(processes: Processes, tmp_path: Path) -> None:
    for reported in on_ranks(processes(WORKERS), awaits_a_failure, tmp_path):
        assert len(reported) == 3
        assert "shape '[2]' is invalid" in reported[0]
        assert reported[-1] == "[1.0, 1.0]"


# ---- The page --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("peer.py", 2), ("stage.py", 3)])
def test_programs_of_the_page_print_the_shown_output(tmp_path: Path, name: str, ranks: int) -> None:
    page = (Path(__file__).parent.parent / "docs" / "rpc.md").read_text()
    found = re.findall(r"```py\n((?:(?!```)[\s\S])*)```\n\n```console\n\$ ([^\n]*)\n([^\n]*\n)```", page)
    ((program, reported),) = ((code, reported) for code, command, reported in found if name in command)
    (tmp_path / name).write_text(program)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), name]
    done = subprocess.run(
        [sys.executable, *command],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TMPDIR": str(tmp_path),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == reported
