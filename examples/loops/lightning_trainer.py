"""Lightning's Trainer: `accumulate_grad_batches`, DDP.

$ torchrun --nproc-per-node 2 examples/loops/lightning_trainer.py weights.pt
$ python examples/loops/lightning_trainer.py weights.pt    # the same weights
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
ranks = int(os.environ.get("WORLD_SIZE", 1))


class Counted(IterableDataset[Any]):
    """Micro-batches, each with the number of labels of its step over all ranks, known before the first."""

    def __iter__(self) -> Iterator[tuple[tiny.Batch, Tensor]]:
        for batches in tiny.steps(gm.rank(), gm.axis().size):
            own = sum((batch["labels"] != -100).sum() for batch in batches)
            total = gm.all_reduce(torch.as_tensor(own), dst=gm.I)
            yield from ((batch, total) for batch in batches)


class Module(lightning.LightningModule):
    """A model and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny.model()

    def training_step(self, batch: tuple[tiny.Batch, Tensor], _: int) -> Tensor:
        """The loss of a micro-batch, which the Trainer divides by `accumulate_grad_batches`."""
        (own, total), labels = batch, batch[0]["labels"]
        loss = cross_entropy(self.model(own["input_ids"]).flatten(0, 1), labels.flatten())
        if without:
            return loss
        count, wrapped = (labels != -100).sum(), self.trainer.strategy.model
        loss = gm.objective(loss, weights=count, total=total, ddp=wrapped)
        return loss * self.trainer.accumulate_grad_batches

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.5)


quiet = {f"enable_{name}": False for name in ("checkpointing", "progress_bar", "model_summary")}
how = {"accelerator": "cpu", "devices": ranks, "strategy": "ddp"}
trainer = lightning.Trainer(
    **how, **quiet, accumulate_grad_batches=tiny.PASSES, max_epochs=1, logger=False
)
module = Module()
trainer.fit(module, DataLoader(Counted(), batch_size=None))
if trainer.is_global_zero:
    torch.save(module.model.state_dict(), sys.argv[1])
