"""FSDP2: `fully_shard`, gradients reduced with the last micro-batch.

$ torchrun --nproc-per-node 2 examples/loops/fsdp2.py weights.pt
$ python examples/loops/fsdp2.py weights.pt    # the same weights
"""

from __future__ import annotations

import sys
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import gradmesh as gm

without = "--without" in sys.argv  # the mean of the means, for comparison
gm.init(backend="gloo")  # or dist.init_process_group
model: Any = fully_shard(tiny.model(), mesh=init_device_mesh("cpu", (gm.axis().size,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for batches in tiny.steps(gm.rank(), gm.axis().size):
    counts = [(batch["labels"] != -100).sum() for batch in batches]
    total = gm.all_reduce(torch.stack(counts).sum(), dst=gm.I)
    for at, (batch, count) in enumerate(zip(batches, counts, strict=True)):
        model.set_requires_gradient_sync(at == len(batches) - 1)
        logits = model(batch["input_ids"])
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss = loss / len(batches) if without else gm.objective(loss, weights=count, total=total, ddp=model)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if gm.rank() == 0:
    torch.save(weights, sys.argv[1])
dist.destroy_process_group()
