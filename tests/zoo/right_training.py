"""Training on several ranks that is the training of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradmesh as gm
from gradmesh.verify import Shard
from tests.zoo.data import common
from tests.zoo.program import right
from tests.zoo.raw import rank, world
from tests.zoo.training import CutMlp, Towers, batch, ddp, mlp, row_losses, target

SAME = {"*": gm.I}
CUT = {"columns": Shard(dim=0), "rows": Shard(dim=1), "bias": gm.I}


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return row_losses(model(x), y).mean()


def fsdp(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (world(),)))


@right("same_as_single", "DDP, three steps of Adam", objective="mean", steps=3)
def trained_under_ddp() -> Any:
    return {
        "distributed": mean_loss,
        "inputs": (batch(), target()),
        "module": mlp,
        "parallel": ddp,
        "parameters": SAME,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    }


@right("same_as_single", "FSDP2, three steps", objective="mean", steps=3)
def trained_under_fsdp2() -> Any:
    return {"distributed": mean_loss, "inputs": (batch(), target()), "module": mlp, "parallel": fsdp}


@right("same_as_single", "a masked mean over the tokens of all ranks", objective="sum", steps=2)
def trained_on_a_global_masked_mean() -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        count = gm.all_reduce(mask.sum(), dst=gm.R)
        return (row_losses(model(x), y) * mask).sum() / count

    mask = torch.tensor([1.0, 0, 0, 1, 1, 1], dtype=torch.float64)
    return {"distributed": loss, "inputs": (batch(), target(), Shard(mask, constant=True)), "module": mlp}


@right("same_as_single", "CLIP with local losses under DDP", objective="mean", steps=2)
def trained_contrastively() -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        images, texts = model(x, y)
        labels = torch.arange(len(images)) + rank() * len(images)
        return F.cross_entropy(images @ gm.all_gather(texts).T, labels)

    inputs = (batch(), batch(1))
    return {"distributed": loss, "inputs": inputs, "module": Towers, "parallel": ddp, "parameters": SAME}


@right("same_as_single", "a tensor-parallel MLP, three steps", objective="replicated", steps=3)
def trained_tensor_parallel() -> Any:
    def loss(model: CutMlp, x: Tensor) -> Tensor:
        hidden = torch.tanh(gm.replicate(x) @ model.columns.T)
        return (gm.all_reduce(hidden @ model.rows.T, dst=gm.I) + model.bias).square().sum()

    return {
        "distributed": loss,
        "inputs": (common(3, 4),),
        "module": lambda: CutMlp(1),
        "parallel": lambda _: CutMlp(world()),
        "parameters": CUT,
    }


@right("same_as_single", "batch norm over the rows of all ranks", objective="mean", steps=2)
def trained_with_synchronized_statistics() -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        h = model(x)
        moments = gm.all_reduce(torch.stack([h.sum(0), h.square().sum(0)]), dst=gm.R)
        mean, square = moments / (world() * len(h))
        return row_losses((h - mean) * torch.rsqrt(square - mean.square() + 1e-3), y).mean()

    inputs = (batch(), target())
    return {"distributed": loss, "inputs": inputs, "module": mlp, "parallel": ddp, "parameters": SAME}
