"""DDP with no_sync.

$ torchrun --nproc-per-node 2 examples/loops/ddp_no_sync.py weights.pt
$ python examples/loops/ddp_no_sync.py weights.pt    # the same weights
"""

from __future__ import annotations

import contextlib
import sys

import tiny
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm

without = "--without" in sys.argv  # the mean of the means, for comparison
gm.init(backend="gloo")  # or dist.init_process_group
model = DistributedDataParallel(tiny.model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for batches in tiny.steps(gm.rank(), gm.axis().size):
    counts = [(batch["labels"] != -100).sum() for batch in batches]
    total = gm.all_reduce(torch.stack(counts).sum(), dst=gm.I)
    for at, (batch, count) in enumerate(zip(batches, counts, strict=True)):
        last = at == len(batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            logits = model(batch["input_ids"])
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            loss = (
                loss / len(batches) if without else gm.objective(loss, weights=count, total=total, ddp=model)
            )
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if gm.rank() == 0:
    torch.save(model.module.state_dict(), sys.argv[1])
dist.destroy_process_group()
