"""The contract of the law tests on processes, thinly: the same functions, all ops in one run a law."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradmesh as gm
from gradmesh.ops.registry import REGISTRY
from gradmesh.testing import has_itself_as_forward_derivative, is_a_loop_under_vmap, is_linear
from gradmesh_pytest.running import World
from tests import contract

pytestmark = pytest.mark.processes
Processes = Callable[[int], Callable[..., list[Any]]]
Worlds = Callable[..., World]


# These send thousands of small messages, which takes four processes on two cores long.
CHATTY = (
    contract.has_its_transpose_as_adjoint,
    is_linear,
    is_a_loop_under_vmap,
    has_itself_as_forward_derivative,
    contract.matches_dense_autograd_to_third_order,
    contract.has_conjugate_wirtinger_gradients_to_third_order,
)


def seldom(law: contract.Check, backend: str, size: int) -> bool:
    """Whether a case is in the sweep only: each law runs once on each backend, on two processes or on four."""
    return size == 4 if law in CHATTY else (backend == "gloo") == (size == 4)


CASES = [
    pytest.param(
        law,
        backend,
        size,
        id=f"{backend}-{law.__name__}-{size}",
        marks=[pytest.mark.slow] if seldom(law, backend, size) else [],
    )
    for law in contract.LAWS
    for backend in ("gloo", "shm")
    for size in (2, 4)
]


@pytest.mark.parametrize(("law", "backend", "size"), CASES)
def test_every_op_on_processes(law: contract.Check, backend: str, size: int, worlds: Worlds) -> None:
    counts = worlds(size, backend, 240).run(contract.on_examples, law, range(len(REGISTRY)))
    assert counts == [counts[0]] * size
    assert counts[0] > 2 * len(REGISTRY)


def test_a_subgroup_of_processes_keeps_the_law(processes: Processes) -> None:
    counts = processes(4)(contract.on_examples, contract.keeps_the_law, range(len(REGISTRY)), "subgroup")
    assert counts[0] == counts[2] == 0
    assert counts[1] == counts[3] > 0


def reductions() -> dict[str, tuple[float, float]]:
    out = {}
    for op in ("max", "min", "prod", "logsumexp", "mean"):
        x = torch.tensor(1.0 + gm.axis().rank, dtype=torch.float64, requires_grad=True)
        y = gm.all_reduce(x, op=op, dst=gm.I)
        y.backward()
        assert x.grad is not None
        out[op] = (y.item(), x.grad.item())
    return out


def test_reductions_on_processes_are_those_on_threads(
    processes: Processes, threads: Callable[[int], Callable[..., list[Any]]]
) -> None:
    assert processes(4)(reductions) == threads(4)(reductions)


SCRIPT = """
import os
import torch, gradmesh as gm
gm.init()
gm.init()  # again does nothing
mesh = gm.mesh(dp=1, gp=-1)
x = torch.tensor([1.0 + gm.axis("gp").rank], requires_grad=True)
y = gm.all_gather(x, "gp")
((1 + gm.axis("gp").rank) * y).sum().backward()
line = f"rank {torch.distributed.get_rank()} {y.tolist()} {x.grad.tolist()}\\n"
os.write(1, line.encode())  # in one piece, as the ranks share the pipe
torch.distributed.destroy_process_group()
"""


def test_a_script_runs_unchanged_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {r} [1.0, 2.0] [3.0]" for r in range(2)]


def test_single_script_is_a_world_of_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=clean
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["rank 0 [1.0] [1.0]"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_verbs_take_cuda_tensors_over_nccl() -> None:
    def on_each_rank() -> tuple[str, list[float]]:
        x = torch.ones(2, device="cuda", requires_grad=True)
        y = gm.all_gather(x) + gm.reduce_scatter(gm.replicate(x)).repeat(gm.axis().size)
        y.sum().backward()
        assert x.grad is not None
        return y.device.type, x.grad.tolist()

    count = torch.cuda.device_count()
    results = gm.launch(on_each_rank, count, backend="cpu:gloo,cuda:nccl")
    assert all(device == "cuda" for device, _ in results)
