"""The exported names, and that an import has no side effects."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import gradmesh as gm
from gradmesh.ops.registry import REGISTRY
from tools import public_api

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


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_dir_shows_the_public_names_alone() -> None:
    run(
        "import gradmesh as gm\n"
        "import gradmesh.verbs.call, gradmesh.compat.towhee  # still there to be imported\n"
        "assert dir(gm) == sorted([*gm.__all__, '__version__', 'compat', 'nn', 'testing', 'verify']), dir(gm)\n"
    )


def test_drop_ins_and_checks_are_there_when_asked_for_and_not_before() -> None:
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
