"""The losses of lightly that gather over the ranks."""

from __future__ import annotations

import sys

import images  # noqa: F401 - before lightly
import torch
import torch.distributed as dist
from lightly import loss as losses
from torch import nn
from torch.nn.parallel import DistributedDataParallel

kind = sys.argv[1]
gathers = {"sinkhorn_gather_distributed" if kind == "SwaVLoss" else "gather_distributed": True}
dist.init_process_group("gloo")
loss_of = getattr(losses, kind)(**gathers)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
prototypes = nn.functional.normalize(torch.randn(5, 4), dim=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(dist.get_rank())
for _ in range(2):
    views = model(torch.randn(6, 6, generator=data)).chunk(2)
    if kind == "SwaVLoss":
        loss = loss_of([nn.functional.normalize(view, dim=1) @ prototypes.T for view in views], [])
    else:
        loss = loss_of(*views, *([prototypes] if kind == "MSNLoss" else []))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
