"""Lightning Fabric: DDP, two micro-batches a step, gradients clipped."""

from __future__ import annotations

import os

import images  # noqa: F401 - before lightning
import torch
from lightning.fabric import Fabric
from torch import nn

PASSES = 2
fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
fabric.launch()
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
data = torch.Generator().manual_seed(fabric.global_rank)
for at in range(2 * PASSES):
    accumulates = at % PASSES < PASSES - 1
    with fabric.no_backward_sync(model, enabled=accumulates):
        fabric.backward(model(torch.randn(3, 6, generator=data)).square().mean() / PASSES)
    if not accumulates:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
