"""Streams, the CUDA sanitizer, the compiler, fused attention, autocast and a hang; skipped where there is no GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.cuda._sanitizer import CUDASanitizerDispatchMode

import gradmesh as gm
from gradmesh.launch import process_ranks
from tests import gpu_programs

Ranks = Callable[[int], Callable[..., list[Any]]]

pytestmark = pytest.mark.device
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpus(program: Callable[[], Any]) -> list[Any]:
    ranks = max(2, torch.cuda.device_count())
    return gm.launch(program, ranks, backend="cpu:gloo,cuda:nccl", timeout=300)


@needs_gpu
def test_verbs_on_a_side_stream_equal_the_default_stream() -> None:
    assert all(on_gpus(gpu_programs.on_side_stream))


@needs_gpu
def test_verbs_on_an_external_stream_equal_the_default_stream() -> None:
    assert all(on_gpus(gpu_programs.on_external_stream))


@needs_gpu
def test_the_sanitizer_finds_no_race_in_the_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_SANITIZER", "1")  # the ranks' processes begin with it
    assert all(on_gpus(gpu_programs.on_side_stream))


@needs_gpu
def test_the_sanitizer_finds_the_race_of_a_program_that_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the test above would show nothing."""
    monkeypatch.setenv("TORCH_CUDA_SANITIZER", "1")
    with pytest.raises(gm.RankError, match=r"CUDASanitizerErrors|data race"):
        on_gpus(gpu_programs.race)


@needs_gpu
def test_compiled_verbs_equal_those_without_the_compiler() -> None:
    assert all(on_gpus(gpu_programs.compiled))


@needs_gpu
def test_ring_attention_of_bfloat16_runs_fused_kernels_and_agrees_with_float64() -> None:
    for errors, kernels in on_gpus(gpu_programs.fused):
        assert max(errors) < 2e-2, errors
        assert any(name.startswith("aten::_scaled_dot_product") for name in kernels), kernels


@needs_gpu
def test_autocast_and_a_scaled_loss_give_the_gradients_of_one_process() -> None:
    for errors in on_gpus(gpu_programs.scaled):
        assert max(errors) < 2e-2, errors


@needs_gpu
def test_a_kernel_that_waits_for_a_rank_is_ended_and_every_rank_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRADMESH_HANG", "1")
    (text, returned, _), other = on_gpus(gpu_programs.left_alone)[:2]
    assert text.startswith("DeadlockError"), text
    assert "rank 1: has made 1 calls" in text
    assert 0 < returned < 8, "the host waits for the GPU until the rank comes"
    assert other[0].startswith("DeadlockError"), other


def test_scaled_gradients_are_those_of_one_process_on_a_cpu(threads: Ranks) -> None:
    for errors in threads(2)(gpu_programs.scaled, "cpu"):
        assert max(errors) < 2e-2, errors


@pytest.mark.parametrize(
    ("rank", "gpus", "host"), [(1, 2, None), (1, 1, "rank 1"), (3, 2, "rank 3"), (0, 1, "rank 0")]
)
def test_ranks_that_are_more_than_the_gpus_share_them_as_hosts_of_their_own(
    rank: int, gpus: int, host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("NCCL_HOSTID", "that of a rank which has launched these")
    monkeypatch.delenv("NCCL_HOSTID")
    said: Any = pytest.warns(UserWarning, match="share 1 GPU") if rank == 0 else contextlib.nullcontext()
    with said:
        process_ranks._choose_gpu(rank, 2 if rank < 2 else 4)
    assert (chosen, os.environ.get("NCCL_HOSTID")) == ([rank % gpus], host)


def under_the_sanitizer() -> bool:
    expected = gpu_programs.values("cpu")
    with CUDASanitizerDispatchMode():
        return gpu_programs.values("cpu") == expected


@pytest.fixture
def a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sanitizer asks for the current stream at every operator, also of CPU tensors."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))


@pytest.mark.usefixtures("a_stream")
def test_the_sanitizers_mode_takes_every_verb_on_a_cpu(threads: Ranks) -> None:
    """It reads the schema of every operator that is dispatched; the verbs' results and gradients are the same in it."""
    assert threads(2)(under_the_sanitizer) == [True, True]


def test_the_programs_are_right_where_there_is_no_gpu(threads: Ranks) -> None:
    first, second = threads(2)(gpu_programs.values, "cpu")
    assert first["all_gather"][0] == second["all_gather"][0]
    assert first["later"] == first["all_gather"]
    assert first["all_gather"][1] != second["all_gather"][1]
