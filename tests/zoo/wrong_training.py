"""Training on several ranks that is not the training of one process: averages, counts, and what stays local."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradmesh as gm
from gradmesh.verify import Shard
from tests.zoo.data import common
from tests.zoo.program import wrong
from tests.zoo.raw import rank, summed, world
from tests.zoo.training import CutMlp, Towers, batch, ddp, mlp, row_losses, target, with_hooks

SAME = {"*": gm.I}
CUT = {"columns": Shard(dim=0), "rows": Shard(dim=1), "bias": gm.I}


@wrong("same_as_single", "1/W", "a summed loss under DDP, which averages gradients")
def ddp_under_a_summed_loss() -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return row_losses(model(x), y).sum()

    inputs = (batch(), target())
    return {"distributed": loss, "inputs": inputs, "module": mlp, "parallel": ddp, "parameters": SAME}


@wrong(
    "same_as_single",
    "1/W",
    "one contrastive loss on every rank behind a slicing gather, under DDP",
    objective="replicated",
)
def ddp_under_one_loss_for_all() -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        images, texts = (gm.all_gather(z, dst=gm.I) for z in model(x, y))
        return F.cross_entropy(images @ texts.T, torch.arange(len(images)))

    inputs = (batch(), batch(1))
    return {"distributed": loss, "inputs": inputs, "module": Towers, "parallel": ddp, "parameters": SAME}


@wrong("same_as_single", "sum over ranks missing", "data parallelism that forgot to reduce the gradients")
def replicas_without_a_reduction() -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return row_losses(model(x), y).sum()

    return {"distributed": loss, "inputs": (batch(), target()), "module": mlp, "parameters": SAME}


@wrong(
    "same_as_single",
    "W times too large",
    "a reduction by hand that sums where the loss is a mean",
    objective="mean",
)
def replicas_that_sum_a_mean() -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return row_losses(model(x), y).mean()

    inputs = (batch(), target())
    parallel = with_hooks(summed)
    return {"distributed": loss, "inputs": inputs, "module": mlp, "parallel": parallel, "parameters": SAME}


@wrong("same_as_single", "1/W", "a loss divided by the number of ranks, under DDP", objective="sum")
def ddp_and_a_loss_divided_by_the_ranks() -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return row_losses(model(x), y).mean() / world()

    inputs = (batch(), target())
    return {"distributed": loss, "inputs": inputs, "module": mlp, "parallel": ddp, "parameters": SAME}


@wrong("same_as_single", "mean of local means", "DDP on batches of different sizes", objective="mean")
def ddp_on_uneven_batches() -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return row_losses(model(x), y).mean()

    inputs = (batch(sizes=(1, 5)), target(sizes=(1, 5)))
    return {"distributed": loss, "inputs": inputs, "module": mlp, "parallel": ddp, "parameters": SAME}


@wrong(
    "same_as_single",
    "mean of local means",
    "a mean over the tokens that a mask leaves, taken on each rank",
    objective="mean",
)
def masked_mean_on_each_rank() -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (row_losses(model(x), y) * mask).sum() / mask.sum()

    mask = torch.tensor([1.0, 0, 0, 1, 1, 1], dtype=torch.float64)
    inputs = (batch(), target(), Shard(mask, constant=True))
    return {"distributed": loss, "inputs": inputs, "module": mlp, "parallel": ddp, "parameters": SAME}


@wrong(
    "same_as_single",
    "mean of local means",
    "graph readout: node energies averaged on each rank, then over ranks",
    objective="replicated",
)
def readout_of_local_means() -> Any:
    def loss(model: nn.Module, nodes: Tensor) -> Tensor:
        return gm.all_reduce(model(nodes).square().sum(1).mean(), op="mean", dst=gm.I)

    return {"distributed": loss, "inputs": (batch(sizes=(2, 4)),), "module": mlp}


@wrong(
    "same_as_single",
    "loss differs",
    "contrastive labels that do not count the rows of the ranks before",
    objective="mean",
)
def contrastive_labels_without_an_offset() -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        images, texts = model(x, y)
        return F.cross_entropy(images @ gm.all_gather(texts).T, torch.arange(len(images)))

    inputs = (batch(), batch(1))
    return {"distributed": loss, "inputs": inputs, "module": Towers, "parallel": ddp, "parameters": SAME}


@wrong(
    "same_as_single",
    "loss differs",
    "a row-parallel layer whose bias is added on every rank before the sum",
    objective="replicated",
)
def bias_added_before_the_reduction() -> Any:
    def loss(model: CutMlp, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ model.columns.T)
        return gm.all_reduce(hidden @ model.rows.T + model.bias, dst=gm.I).square().sum()

    def parallel(_: nn.Module) -> nn.Module:
        return CutMlp(world())

    return {
        "distributed": loss,
        "inputs": (common(3, 4),),
        "module": lambda: CutMlp(1),
        "parallel": parallel,
        "parameters": CUT,
    }


@wrong("same_as_single", "loss differs", "batch norm over the rows of one rank", objective="mean")
def batch_norm_of_each_rank() -> Any:
    def module() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return row_losses(model(x), y).mean()

    inputs = (batch(), target())
    return {"distributed": loss, "inputs": inputs, "module": module, "parallel": ddp, "parameters": SAME}


@wrong(
    "same_as_single",
    "loss differs",
    "positions counted from zero on every rank of a cut sequence",
    objective="sum",
)
def positions_counted_on_each_rank() -> Any:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x + torch.arange(len(x), dtype=x.dtype)[:, None].sin()).square().sum()

    return {"distributed": loss, "inputs": (batch(),), "module": mlp}


@wrong(
    "same_as_single",
    "parameter differs",
    "gradients clipped by the norm of this rank's shard of the model",
    objective="replicated",
)
def clipping_by_the_local_norm() -> Any:
    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
            return super().step(closure)

    def loss(model: CutMlp, x: Tensor) -> Tensor:
        hidden = torch.tanh(gm.replicate(x) @ model.columns.T)
        return (gm.all_reduce(hidden @ model.rows.T, dst=gm.I) + model.bias).square().sum()

    def parallel(_: nn.Module) -> nn.Module:
        return CutMlp(world())

    return {
        "distributed": loss,
        "inputs": (common(3, 4),),
        "module": lambda: CutMlp(1),
        "parallel": parallel,
        "parameters": CUT,
        "optimizer": lambda parameters: Clipped(parameters, lr=0.1),
    }


@wrong(
    "same_as_single",
    "sum over ranks missing",
    "a contrastive loss behind a slicing gather, under DDP",
    objective="mean",
)
def ddp_and_a_slicing_gather() -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        images, texts = model(x, y)
        labels = torch.arange(len(images)) + rank() * len(images)
        return F.cross_entropy(images @ gm.all_gather(texts, dst=gm.I).T, labels)

    inputs = (batch(), batch(1))
    return {"distributed": loss, "inputs": inputs, "module": Towers, "parallel": ddp, "parameters": SAME}


@wrong(
    "same_as_single",
    "summed twice",
    "two hooks that reduce one gradient, a framework's and the user's",
    also=("W times too large",),
    objective="mean",
)
def replicas_reduced_by_two_hooks() -> Any:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return row_losses(model(x), y).mean()

    parallel = with_hooks(lambda grad: summed(summed(grad) / world()))
    inputs = (batch(), target())
    return {"distributed": loss, "inputs": inputs, "module": mlp, "parallel": parallel, "parameters": SAME}
