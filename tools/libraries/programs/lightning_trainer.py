"""Lightning's Trainer: a module over DDP or FSDP, two micro-batches a step, gradients clipped."""

from __future__ import annotations

import os
import sys

import images  # noqa: F401 - before pytorch_lightning
import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PASSES = 2


class Regression(lightning.LightningModule):
    """Three layers, and the mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        x, y = batch
        return (self.model(x) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randn(48, 1))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy=sys.argv[1],
    accumulate_grad_batches=PASSES,
    gradient_clip_val=1.0,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), DataLoader(data, batch_size=3))
