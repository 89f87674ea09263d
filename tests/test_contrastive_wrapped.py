"""Contrastive losses under DDP and FSDP: the gradients, averaged, are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm
from tests.test_contrastive import Towers, normal

LOSSES: dict[str, Callable[..., nn.Module]] = {
    "barlow_twins": gm.nn.BarlowTwinsLoss,
    "clip": gm.nn.ClipLoss,
    "clip, ring": lambda **o: gm.nn.ClipLoss(gather="ring", tile=2, **o),
    "siglip": gm.nn.SigLipLoss,
    "nt_xent": lambda **o: gm.nn.NTXentLoss(learnable=True, **o),
    "vic_reg": gm.nn.VicRegLoss,
}
SIZES = (5, 2)


def make(loss: str, **options: Any) -> Towers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Towers(LOSSES[loss](**options)).double()


def gradients(loss: str, kind: str) -> dict[str, list[Tensor]]:
    model: Any = make(loss, dst=gm.R)
    inside = model
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    x, y = (normal(7, 5, seed=s)[gm.axis().slice(SIZES)] for s in (1, 2))
    value = gm.objective(model(x, y), loss_type=gm.R, ddp=model)
    value.backward()
    if kind == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {"value": [value.detach()], "grads": [p.grad.clone() for p in inside.parameters()]}
    grads = [p.grad for p in inside.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    if kind == "none":  # each rank has a share
        whole = [gm.all_reduce(g, dst=gm.I) for g in whole]
    return {"value": [value.detach()], "grads": whole}


def alone(loss: str) -> tuple[Tensor, list[Tensor]]:
    model = make(loss)

    def run() -> tuple[Tensor, list[Tensor]]:
        value = model(normal(7, 5, seed=1), normal(7, 5, seed=2))
        return value.detach(), list(torch.autograd.grad(value, list(model.parameters())))

    return gm.launch(run, 1, backend="threads")[0]


@pytest.mark.processes
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp", "none"])
def test_the_averaged_gradient_is_that_of_one_process(loss: str, kind: str, worlds: Any) -> None:
    expected, grads = alone(loss)
    for found in worlds(2, "gloo", 240).run(gradients, loss, kind):
        torch.testing.assert_close(found["value"][0], expected)
        for got, right in zip(found["grads"], grads, strict=True):
            torch.testing.assert_close(got, right)


def beyond_its_bound(kind: str) -> Tensor:
    model: Any = make("clip", scale=50.0, max_scale=10.0, dst=gm.R)
    if kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif kind == "fsdp":
        fully_shard(model)
    value: Tensor = model(*(normal(7, 5, seed=s)[gm.axis().slice(SIZES)] for s in (1, 2)))
    return value.detach()


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["none", "fsdp1", "fsdp"])
def test_a_scale_beyond_its_bound_is_used_as_the_bound_in_every_wrapper(kind: str, worlds: Any) -> None:
    model = make("clip", scale=10.0)
    inputs = [normal(7, 5, seed=s) for s in (1, 2)]
    expected = gm.launch(lambda: model(*inputs).detach(), 1, backend="threads")[0]
    for found in worlds(2, "gloo", 240).run(beyond_its_bound, kind):
        torch.testing.assert_close(found, expected)
