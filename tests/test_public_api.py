"""The exported names, and that an import has no side effects."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradmesh as gm
from gradmesh.launch.process_ranks import held_port
from gradmesh.ops.registry import REGISTRY
from tests.forking import Forking
from tools import public_api

MOST_MODULES = 60
"""Modules of gradmesh that importing it loads."""

CONTRACT = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis",
    "broadcast",
    "convert",
    "exscan",
    "gather",
    "halo_exchange",
    "init",
    "launch",
    "mesh",
    "permute",
    "reduce",
    "reduce_scatter",
    "replicate",
    "scan",
    "scatter",
    "shard",
    "shift",
    "sizes",
    "use_mesh",
    "V",
    "R",
    "I",
    "P",
]


def test_the_public_names_are_sorted_and_there() -> None:
    assert gm.__all__ == sorted(gm.__all__)
    assert all(hasattr(gm, name) for name in gm.__all__)
    assert set(CONTRACT) <= set(gm.__all__)


def test_public_api_matches_its_list() -> None:
    listed = (Path(__file__).parent / "public_api.txt").read_text().splitlines()
    assert public_api.lines() == listed, "python -m tools.report tests/public_api.txt"


def test_every_verb_of_the_registry_is_public() -> None:
    verbs = {row.call.split("(")[0] for row in REGISTRY if row.public}
    assert verbs <= set(gm.__all__)
    for row in REGISTRY:
        for op, _ in row.examples(gm.Axis("any", 0, 2, None)):  # type: ignore[arg-type]
            assert op.verb in gm.__all__


def test_importing_needs_torch_alone_and_starts_nothing() -> None:
    code = (
        "import sys, threading, torch, torch.distributed as dist; before = set(sys.modules)\n"
        "import gradmesh\n"
        "extras = {'numpy', 'sklearn', 'rich', 'click', 'matplotlib', 'cloudpickle'} & (set(sys.modules) - before)\n"
        "assert not extras, extras\n"
        "assert threading.active_count() == 1\n"
        "assert not dist.is_initialized()\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-W", "ignore::DeprecationWarning:torch", "-c", code],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def run(forking: Forking) -> Callable[[str], str]:
    """The output of a program that imports gradmesh for the first time."""

    def output(code: str) -> str:
        done = forking.run(code)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    return output


def test_dir_shows_the_public_names_alone(run: Callable[[str], str]) -> None:
    run(
        "import gradmesh as gm\n"
        "import gradmesh.verbs.call, gradmesh.compat.towhee  # still there to be imported\n"
        "assert dir(gm) == sorted([*gm.__all__, '__version__', 'compat', 'nn', 'testing', 'verify']), dir(gm)\n"
    )


def test_drop_ins_and_checks_are_there_when_asked_for_and_not_before(run: Callable[[str], str]) -> None:
    run(
        "import sys, gradmesh as gm\n"
        "assert not {'gradmesh.compat', 'gradmesh.nn', 'gradmesh.verify'} & set(sys.modules)\n"
        "assert callable(gm.nn.graph.by_count)\n"
        "assert callable(gm.verify.adjoint_matrix_error) and callable(gm.compat.towhee.AllGather.apply)\n"
        "assert {'gradmesh.compat', 'gradmesh.nn', 'gradmesh.verify'} <= set(sys.modules)\n"
    )


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gradmesh' has no attribute 'all_redcue'"):
        gm.all_redcue  # type: ignore[attr-defined]  # noqa: B018


def test_the_version_is_that_of_the_package() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", gm.__version__)
    assert gm.__version__ == metadata.version("gradmesh")


def test_importing_loads_a_limited_number_of_modules(run: Callable[[str], str]) -> None:
    loaded = run("import gradmesh, sys; print(*(m for m in sys.modules if m.startswith('gradmesh')))").split()
    assert len(loaded) <= MOST_MODULES, sorted(loaded)
    for package in ("checker", "compat", "nn", "type_inference", "verify", "backends.shm.", "launch."):
        assert not [module for module in loaded if module.startswith(f"gradmesh.{package}")]


def test_lazy_names_are_the_names_of_their_modules(run: Callable[[str], str]) -> None:
    public = set(gm.__all__)
    assert set(gm._LAZY) <= public
    assert set(dir(gm)) > public
    for name, module in gm._LAZY.items():
        assert getattr(gm, name) is getattr(importlib.import_module(module), name)
    files = {file.stem for file in Path(gm.__file__).parent.iterdir()}
    assert not files & set(gm._LAZY), "importing the file would replace the name"
    run("from gradmesh import *; assert typed.__name__ == 'typed' and Order and no_sync")
    with pytest.raises(AttributeError, match="no attribute 'all_redcue'"):
        gm.all_redcue  # type: ignore[attr-defined]  # noqa: B018


def test_lazy_names_are_loaded_by_several_threads_at_once(run: Callable[[str], str]) -> None:
    names = sorted([*gm._LAZY, "nn", "verify", "compat"])
    code = (
        "import sys, threading, gradmesh as gm\n"
        "sys.setswitchinterval(1e-5)\n"
        f"names = {names}\n"
        "start, found = threading.Barrier(8), [None] * 8\n"
        "def load(n):\n"
        "    start.wait()\n"
        "    order = names[n:] + names[:n]\n"
        "    found[n] = {name: getattr(gm, name) for name in (order if n % 2 else order[::-1])}\n"
        "threads = [threading.Thread(target=load, args=(n,)) for n in range(8)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "assert all(one == found[0] for one in found), found\n"
    )
    run(code)


def test_first_use_on_several_thread_ranks_at_once(run: Callable[[str], str]) -> None:
    code = (
        "import torch, gradmesh as gm\n"
        "def on_each_rank():\n"
        "    x = torch.ones(1, requires_grad=True)\n"
        "    with gm.typed(), gm.ordered():\n"
        "        y = gm.all_gather(gm.scale_gradient(x, 2), async_op=True).wait()\n"
        "        gm.backward(gm.objective(y.sum()))\n"
        "    with gm.coalesce(), gm.no_sync():\n"
        "        pending = gm.all_gather(x.detach(), async_op=True)\n"
        "    pending.wait()\n"
        "    return x.grad.item()\n"
        "print(gm.launch(on_each_rank, 4, backend='threads'))\n"
    )
    assert run(code).split() == ["[2.0,", "2.0,", "2.0,", "2.0]"]


def _sum_on_shm(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group("shm", store=store, rank=rank, world_size=2)
    x = torch.tensor([1.0 + rank])
    dist.all_reduce(x)
    assert x.item() == 3
    dist.destroy_process_group()


@pytest.mark.processes
def test_import_registers_shm_for_spawned_processes() -> None:
    with held_port() as port:
        torch.multiprocessing.spawn(_sum_on_shm, (port,), nprocs=2)  # type: ignore[attr-defined]


def test_import_registers_shm(run: Callable[[str], str]) -> None:
    run(
        "import gradmesh, torch, torch.distributed as dist\n"
        "assert not [name for name in __import__('sys').modules if 'shm.group' in name]\n"
        "dist.init_process_group('shm', store=dist.HashStore(), rank=0, world_size=1)\n"
        "x = torch.ones(2); dist.all_reduce(x)\n"
        "group = dist.new_group(backend='shm'); dist.all_reduce(x, group=group)\n"
        "assert x.tolist() == [1, 1]\n"
        "dist.destroy_process_group()\n"
    )


def test_public_functions_and_classes_are_pickled_by_name(run: Callable[[str], str]) -> None:
    text = pickle.dumps([value for name in gm.__all__ if inspect.isroutine(value := getattr(gm, name))])
    run(f"import pickle; assert all(map(callable, pickle.loads({text!r})))")
    assert pickle.loads(pickle.dumps([gm.Order, gm.Types, gm.Ranks])) == [gm.Order, gm.Types, gm.Ranks]
