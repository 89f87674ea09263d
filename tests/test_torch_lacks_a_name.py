"""A torch that lacks a private name: one warning at import, and then the rest works or is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradmesh as gm
from gradmesh import _torch
from gradmesh._torch import fsdp, names, operators
from gradmesh.checker import command
from tests.forking import Forking
from tests.lacking import EFFECT, FEATURES

THREADS = {
    "threads",
    "attention",
    "async calls",
    "by hand",
    "forward mode on threads",
    "no_sync",
    "ordered",
    "raw collectives",
}  # all that run on the threads backend
OPAQUE = {"compiled all_gather", "compiled reduce", "compiled ragged all_gather", "compiled shift"}
FUNCTIONAL = {
    "all_gather_into_tensor": {"reorderable all_gather"},
    "all_reduce": {"reorderable all_reduce"},
    "all_to_all_single": {"reorderable all_to_all"},
    "broadcast": {"reorderable broadcast"},
    "reduce_scatter_tensor": {"reorderable reduce_scatter"},
}
LEVELS = {"forward mode on threads"}
NOT_COMPILED = {name for name in FEATURES if not name.startswith(("compiled", "reorderable"))}
RAW = {"raw collectives"}

# The features that are refused without a name; all others are right, with or without it.
REFUSED: dict[str, set[str]] = {
    **{f"torch.ops._c10d_functional.{op}": features for op, features in FUNCTIONAL.items()},
    "torch.ops._c10d_functional.wait_tensor": set.union(*FUNCTIONAL.values()),
    "torch.distributed.distributed_c10d._resolve_process_group": OPAQUE.union(*FUNCTIONAL.values()),
    **dict.fromkeys(EFFECT, OPAQUE),
    "torch._subclasses.FakeTensor": {"no_sync", "tensors without values"},
    "torch._C._are_functorch_transforms_active": set(FEATURES) - RAW,
    "torch._C._functorch.get_interpreter_stack": {"vmap in ordered"},
    "torch._C._functorch.TransformType.Vmap": {"vmap in ordered"},
    "torch._C._functorch.is_legacy_batchedtensor": NOT_COMPILED - RAW,
    "torch._C._vmapmode_increment_nesting": {"batched gradients"},
    "torch._C._vmapmode_decrement_nesting": {"batched gradients"},
    "torch._remove_batch_dim": {"batched gradients"},
    "torch._add_batch_dim": {"batched gradients"},
    "torch._C._set_grad_enabled": THREADS,
    "torch._C._is_fwd_grad_enabled": THREADS,
    "torch._C._set_fwd_grad_enabled": THREADS,
    "torch._C._len_torch_dispatch_stack": NOT_COMPILED,
    "torch._C._len_torch_function_stack": THREADS,
    "torch._C._current_graph_task_id": THREADS - RAW | {"profile", "vmap in ordered"},
    "torch._C._autograd._top_saved_tensors_default_hooks": {
        "async calls",
        "by hand",
        "ordered",
        "vmap in ordered",
    },
    "torch._C._autograd._get_sequence_nr": {"by hand", "ordered"},
    "torch._C._current_autograd_node": {"by hand", "no_sync", "ordered"},
    "torch._C._will_engine_execute_node": {"no_sync"},
    "torch._C.TensorBase._backward_hooks": {"no_sync"},
    "torch._C.TensorBase._post_accumulate_grad_hooks": {"no_sync"},
    "torch.autograd.Variable._execution_engine.queue_callback": {"no_sync"},
    "torch.autograd.profiler._is_profiler_enabled": NOT_COMPILED - RAW - {"tensors without values"},
    "torch.autograd.forward_ad._current_level": set(FEATURES) - RAW,
    "torch._C._enter_dual_level": LEVELS,
    "torch._C._exit_dual_level": LEVELS,
    "torch._functorch.eager_transforms.JVP_NESTING": LEVELS,
    "torch._functorch.eager_transforms.enter_jvp_nesting asking for JVP_NESTING": LEVELS,
    "torch.autograd.forward_ad.dual_level.__enter__ asking for enter_dual_level": LEVELS,
    "torch.autograd.forward_ad.dual_level.__exit__ asking for exit_dual_level": LEVELS,
    "torch._functorch.predispatch.DECOMPOSITIONS_LOCK": THREADS,
    "torch.distributed.distributed_c10d._world": THREADS,
    "torch.distributed.distributed_c10d._World": THREADS,
    "torch._C._distributed_c10d._set_thread_isolation_mode": THREADS,
    "torch.distributed.distributed_c10d._new_process_group_helper": {"attention", "async calls"},
    "torch.distributed.distributed_c10d._get_default_store": {"attention", "async calls"},
}


SELDOM = {
    *(
        f"torch.ops._c10d_functional.{op}"
        for op in ("all_gather_into_tensor", "all_to_all_single", "broadcast")
    ),
    "torch.ops._c10d_functional.reduce_scatter_tensor",
    *EFFECT,
    "torch.ops._c10d_functional.wait_tensor",
    "torch._C._are_functorch_transforms_active",
    "torch.autograd.forward_ad._current_level",
}
"""Names without which programs are compiled, which takes long, and of which others are like them: in the sweep only."""


def tried_in_the_sweep() -> set[str]:
    """Names whose features are tried in the sweep only: those like two others, for the same features are refused."""
    found, like = set(SELDOM), Counter[frozenset[str]]()
    for name in _torch.RELIED_ON:
        kind = frozenset(REFUSED.get(name, ()))
        like[kind] += name not in SELDOM
        if like[kind] > 2:
            found.add(name)
    return found


_FEATURES = "test_without_a_name_a_feature_is_right_or_refused"


def names_but(seldom: set[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in seldom)) for name in _torch.RELIED_ON]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `tests/lacking.py` finds without each of the names that are asked for."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = [test for test in tests if "reports" in test.fixturenames]
    tried = {str(test.callspec.params["name"]) for test in asked if test.originalname == _FEATURES}
    imported = {str(test.callspec.params["name"]) for test in asked} - tried
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.lacking",
            *sorted(tried),
            "--import",
            *sorted(imported),
        ],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}


def test_this_torch_has_every_name() -> None:
    assert names.gone == []


def test_every_name_that_is_expected_to_be_refused_is_relied_on() -> None:
    assert set(REFUSED) <= set(_torch.RELIED_ON)
    assert set.union(*REFUSED.values()) <= set(FEATURES)


@pytest.mark.parametrize("name", names_but(SELDOM))
def test_missing_private_name_warns_once_with_the_consequence(name: str, reports: dict[str, Any]) -> None:
    ((category, text),) = reports[name]["warnings"]
    assert category == gm.TorchWarning.__name__
    assert f"torch {torch.__version__}" in text
    assert f"missing {name}: {_torch.RELIED_ON[name]}" in text
    assert text.count("\n") == 3, "it names others"


@pytest.mark.parametrize("name", names_but(tried_in_the_sweep()))
def test_without_a_name_a_feature_is_right_or_refused(name: str, reports: dict[str, Any]) -> None:
    features: dict[str, str] = reports[name]["features"]
    refused = REFUSED.get(name, set())
    assert refused <= set(features)
    assert features == {feature: "refused" if feature in refused else "right" for feature in features}


def test_several_names_that_are_gone_give_one_warning(forking: Forking) -> None:
    code = (
        "import torch, warnings\n"
        "del torch._C._profiler._RecordFunctionFast, torch._C._current_graph_task_id\n"
        "warnings.simplefilter('always')\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    import gradmesh as gm\n"
        "(warning,) = caught\n"
        "assert warning.category is gm.TorchWarning\n"
        "assert '_RecordFunctionFast' in str(warning.message)\n"
        "assert '_current_graph_task_id' in str(warning.message)\n"
    )
    done = forking.run(code)
    assert done.returncode == 0, done.stderr


def test_of_several_ranks_on_a_machine_one_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "gone", ["torch._this"])
    monkeypatch.setattr(names, "RELIED_ON", {"torch._this": "more work"})
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.warns(gm.TorchWarning, match=r"missing torch\._this: more work"):
        names.warn_of_what_is_gone()
    monkeypatch.setenv("LOCAL_RANK", "1")
    names.warn_of_what_is_gone()  # a warning is an error here
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("multiprocessing.parent_process", object)
    names.warn_of_what_is_gone()


def test_error_names_the_torch_version_and_the_missing_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "gone", ["torch._this"])
    with pytest.raises(gm.TorchVersionError, match=r"missing private names: torch\._this\n") as caught:
        names.refuse("a feature", "torch._this", "torch._that")
    assert torch.__version__ in str(caught.value)
    assert names.SUPPORTED in str(caught.value)


def test_a_name_is_found_or_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "gone", [])
    monkeypatch.setattr(names, "RELIED_ON", {})
    assert names.find("torch.nn.functional.relu", without="x") is torch.nn.functional.relu
    assert names.there("torch.autograd.forward_ad._current_level", without="x")
    assert names.calls("torch.autograd.forward_ad.dual_level.__enter__", "enter_dual_level", without="x")
    assert names.gone == []
    assert names.find("torch._none.at_all", without="x") is None
    assert not names.there("torch.autograd.forward_ad._no_level", without="x")
    assert not names.calls("torch.autograd.forward_ad.dual_level.__enter__", "no_level", without="x")
    assert not names.calls("torch.ones", "in C++", without="x")
    assert len(names.gone) == 4
    assert set(names.gone) < set(names.RELIED_ON)


def test_required_name_that_is_missing_raises_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "gone", [])
    monkeypatch.setattr(names, "RELIED_ON", {})
    assert names.required("torch.nn.functional.relu", "a feature") is torch.nn.functional.relu
    assert names.getter("torch._C.TensorBase._version", "a feature")(torch.ones(1)) == 0
    assert names.gone == []
    for missing in (
        names.required("torch._none", "a feature"),
        names.getter("torch.Tensor._none", "a feature"),
    ):
        with pytest.raises(gm.TorchVersionError, match=r"a feature is not supported.*(\n.*)*missing.*_none"):
            missing(torch.ones(1))
        with pytest.raises(gm.TorchVersionError, match="a feature is not supported"):
            isinstance(1, missing)
    assert names.RELIED_ON["torch._none"] == "a feature raises an error"


def test_a_list_of_redistributions_is_refused_where_torch_does_not_show_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed.tensor import _dispatch

    monkeypatch.setattr(names, "gone", [])
    monkeypatch.delattr(_dispatch, "ExplicitRedistributionContext", raising=False)  # torch 2.9 lacks it
    assert operators.redistribution_observer(None) is None
    with pytest.raises(gm.TorchVersionError, match="gradmesh check --redistributions"):
        command.check_command([__file__], redistributions=True)


@pytest.mark.parametrize(
    ("used", "name"),
    [
        (fsdp.fully_sharded, "_get_fsdp_state"),
        (fsdp.flat_parameters, "_handle"),
        (fsdp.ignored_by_fsdp, "_ignored_params"),
        (lambda module: list(fsdp.flattened(module)), "_handle"),
    ],
)
def test_wrapper_without_a_private_attribute_is_refused_by_name(
    used: Callable[[torch.nn.Module], object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "gone", [])
    assert name in {path.rpartition(".")[2] for path in names.RELIED_ON_LATER}
    with pytest.raises(gm.TorchVersionError, match=rf"missing private names: .*{name}\n"):
        used(torch.nn.Linear(1, 1))
