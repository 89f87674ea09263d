"""Lightning Fabric: DDP, with `no_backward_sync`.

$ torchrun --nproc-per-node 2 examples/loops/fabric_loop.py weights.pt
$ python examples/loops/fabric_loop.py weights.pt    # the same weights
"""

from __future__ import annotations

import os
import sys

import tiny
import torch
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy

import gradmesh as gm

without = "--without" in sys.argv  # the mean of the means, for comparison
fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp")
fabric.launch()
gm.init(backend="gloo")
plain = tiny.model()
model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
for batches in tiny.steps(fabric.global_rank, fabric.world_size):
    counts = [(batch["labels"] != -100).sum() for batch in batches]
    total = fabric.all_reduce(torch.stack(counts).sum(), reduce_op="sum")
    for at, (batch, count) in enumerate(zip(batches, counts, strict=True)):
        with fabric.no_backward_sync(model, enabled=at < len(batches) - 1):
            logits = model(batch["input_ids"])
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            loss = (
                loss / len(batches) if without else gm.objective(loss, weights=count, total=total, ddp=model)
            )
            fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
if fabric.is_global_zero:
    torch.save(plain.state_dict(), sys.argv[1])
