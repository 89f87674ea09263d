"""Ranks without data for a module, under DDP and FSDP, train the model of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm
from gradmesh.checker.run import Target, check_script

Ranks = Callable[[int], Callable[..., list[Any]]]
Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    """Text always, pictures on some ranks; the parts that FSDP wraps are nested."""

    def __init__(self, seed: int, example: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.vision = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.text, self.head, self.example = nn.Linear(2, 3), nn.Linear(3, 1), example

    def forward(self, text: Tensor, pictures: Tensor, follows: bool) -> Tensor:
        """With `follows` the pictures' part reads the text's result, and not the other way round."""
        x = self.text(text)
        before = x.sum() if follows else x.new_zeros(())
        if len(pictures):
            y = x + self.vision(pictures + before).sum(0)
            return self.head(y).square().sum()
        example = (torch.zeros(1, 4) + before,) if self.example else ()  # requires grad where the pictures do
        dropped = gm.nn.skipped(self.vision, *example)
        return self.head(x).square().sum() + dropped


def on_cpu(module: nn.Module, original: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=original)


def wrapped(model: Model, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fully_shard":
        for part in (model.vision[0], model.vision, model.text, model):
            fully_shard(part)
        return model
    if how == "fully_shard as a whole":
        return fully_shard(model)
    nested, original = how.startswith("fsdp1 nested"), how.endswith("original")
    if nested:
        model.vision = on_cpu(model.vision, original)  # type: ignore[assignment]
    return on_cpu(model, original)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The parameters, by their names without wrappers."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                for name, p in model.named_parameters()
            }
    found = {}
    for name, p in model.named_parameters():
        found[name.removeprefix("module.")] = p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
    return found


WAYS = {
    "ddp": False,
    "ddp with an example": True,
    "fully_shard": True,
    "fully_shard as a whole": False,
    "fsdp1, original": False,
    "fsdp1, flat": False,
    "fsdp1 nested, original": True,
    "fsdp1 nested, flat": True,
}


def deviation(how: str, example: bool, seed: int) -> float:
    """The largest between parameters after three steps here and in one process."""
    size, rank = gm.world_size(), gm.rank()
    drawn = torch.Generator().manual_seed(seed)
    model = Model(seed, example)
    dense = copy.deepcopy(model)
    counts = torch.randint(0, 3, (3, size), generator=drawn).tolist()
    follows = bool(torch.randint(0, 2, (), generator=drawn))
    counts[0][seed % size] = 0
    steps: list[list[Batch]] = [
        [
            (
                torch.randn(2, 2, generator=drawn),
                torch.randn(count, 4, generator=drawn) if count else torch.zeros(0, 4),
            )
            for count in each
        ]
        for each in counts
    ]
    parallel = wrapped(model, how.removesuffix(" with an example"))
    ours = torch.optim.SGD(parallel.parameters(), 0.05, momentum=0.9)
    theirs = torch.optim.SGD(dense.parameters(), 0.05, momentum=0.9)
    for batches in steps:
        ours.zero_grad()
        ((1 + rank) * parallel(*batches[rank], follows)).backward()
        ours.step()
        theirs.zero_grad()
        losses = [(1 + other) * dense(*batch, follows) for other, batch in enumerate(batches)]
        (torch.stack(losses).sum() / size).backward()
        theirs.step()
    found = whole(parallel)
    return max(float((found[name] - p.detach()).abs().max()) for name, p in dense.named_parameters())


@pytest.mark.processes
@pytest.mark.parametrize("how", WAYS)
def test_ranks_without_data_for_a_module_train_the_model_of_one_process(how: str, processes: Ranks) -> None:
    for seed in range(3):
        assert max(processes(3)(deviation, how, WAYS[how], seed)) < 1e-5


def test_a_wrapped_module_cannot_be_skipped_without_an_example(threads: Ranks) -> None:
    def work() -> None:
        model = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 1))
        with pytest.raises(gm.ArgumentError, match=r"has parts in FSDP or DDP[\s\S]*pass an example"):
            gm.nn.skipped(model)

    threads(2)(work)


@pytest.mark.parametrize(
    ("module", "inputs", "problem"),
    [
        (nn.Tanh(), (), r"no parameters[\s\S]*leave out the call"),
        (nn.Identity(), ([],), r"no tensor[\s\S]*pass an example"),
        (nn.ParameterList([torch.zeros(1)]), (), None),
        (nn.Sequential(nn.Linear(1, 1), nn.Threshold(1, 0)), (torch.zeros(1, 1),), None),
    ],
)
def test_a_module_without_parameters_or_results_is_an_error(
    module: nn.Module, inputs: tuple[Any, ...], problem: str | None
) -> None:
    if problem is None:
        gm.nn.skipped(module, *inputs).backward()
        assert all(p.grad is not None and not p.grad.any() for p in module.parameters())
    else:
        with pytest.raises(gm.ArgumentError, match=problem):
            gm.nn.skipped(module, *inputs)


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def test_a_result_that_is_detached_is_an_error_unless_gradients_are_off() -> None:
    with pytest.raises(gm.ArgumentError, match=r"no tensor that requires grad[\s\S]*not detached"):
        gm.nn.skipped(Detached(2, 2), torch.zeros(1, 2))
    with torch.no_grad():
        zero = gm.nn.skipped(Detached(2, 2), torch.zeros(1, 2))
    assert zero.item() == 0
    assert not zero.requires_grad


def test_frozen_parameters_get_no_gradient_and_a_dtype_is_kept() -> None:
    module = nn.Linear(2, 2, dtype=torch.bfloat16)
    module.weight.requires_grad_(False)
    loss = torch.ones((), requires_grad=True) + gm.nn.skipped(module)
    assert loss.dtype == torch.float32
    loss.backward()
    assert module.weight.grad is None
    assert module.bias.grad is not None
    assert not module.bias.grad.any()
    assert not gm.nn.skipped(module.requires_grad_(False)).requires_grad


SCRIPT = """
import gradmesh as gm, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision, self.text, self.head = nn.Linear(4, 3), nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, text, pictures):
        x, dropped = self.text(text), 0.0
        if len(pictures):
            x = x + self.vision(pictures).mean(0)
        {otherwise}
        return self.head(x).square().mean() + dropped


model = Model()
{wrap}
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 2) + rank, torch.randn(2 if rank == 0 else 0, 4))
    loss.backward()
    optimizer.step()
"""
WRAPS = {
    "ddp": "model = DistributedDataParallel(model)",
    "fully_shard": "for part in (model.vision, model.text, model): fully_shard(part)",
}


@pytest.mark.processes
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_check_names_a_module_that_ranks_skip_and_accepts_one_that_is_skipped_with_a_zero(
    wrap: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(wrap=WRAPS[wrap], otherwise=""))
    (found,) = check_script(Target(str(script)), ranks=2, timeout=20).findings
    assert found.rule.id == "GM401"
    assert "gm.nn.skipped" in found.remedy
    if wrap == "ddp":
        assert "rank 1 does not depend on vision.weight, vision.bias" in found.message
    dropped = "else:\n            dropped = gm.nn.skipped(self.vision, torch.zeros(1, 4))"
    script.write_text(SCRIPT.format(wrap=WRAPS[wrap], otherwise=dropped))
    verdict = check_script(Target(str(script)), ranks=2, timeout=20)
    assert not verdict.findings
    assert not verdict.notes
