"""Lightning's Trainer: `accumulate_grad_batches`, DDP.

$ torchrun --nproc-per-node 2 examples/loops/lightning_trainer.py weights.pt
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as lightning
import tiny
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

import gradmesh as gm

without = "--without" in sys.argv  # the mean of the means, for comparison


class Counted(IterableDataset[Any]):
    """Micro-batches, each with the number of labels of its step over all ranks, known before the first."""

    def __iter__(self) -> Iterator[tuple[tiny.Batch, Tensor]]:
        for batches in tiny.steps(gm.rank(), gm.axis().size):
            own = torch.cat([batch["labels"].flatten() for batch in batches]) != -100
            total = gm.all_reduce(own.sum(), dst=gm.I)
            yield from ((batch, total) for batch in batches)


class Module(lightning.LightningModule):
    """A model and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny.model()

    def training_step(self, batch: tuple[tiny.Batch, Tensor], _: int) -> Tensor:
        (own, total), labels = batch, batch[0]["labels"]
        loss = cross_entropy(self.model(own["input_ids"]).flatten(0, 1), labels.flatten())
        if not without:
            count, wrapped = (labels != -100).sum(), self.trainer.strategy.model
            loss = gm.objective(loss, weights=count, total=total, ddp=wrapped)
            loss = loss * self.trainer.accumulate_grad_batches  # the Trainer divides by it
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


devices = int(os.environ.get("WORLD_SIZE", 1))
trainer = lightning.Trainer(devices=devices, accumulate_grad_batches=2, **tiny.LIGHTNING)
module = Module()
trainer.fit(module, DataLoader(Counted(), batch_size=None))
if trainer.is_global_zero:
    torch.save(module.model.state_dict(), sys.argv[1])
