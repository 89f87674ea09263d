"""accelerate: the loop of its guide, with `accumulate`.

$ torchrun --nproc-per-node 2 examples/loops/accelerate_loop.py weights.pt
$ python examples/loops/accelerate_loop.py weights.pt    # the same weights
"""

from __future__ import annotations

import sys

import tiny
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

import gradmesh as gm

without = "--without" in sys.argv  # the mean of the means, for comparison
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=tiny.PASSES)
gm.init(backend="gloo")  # in one process accelerate makes no process group
plain = tiny.model()
model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
for batches in tiny.steps(accelerator.process_index, accelerator.num_processes):
    counts = [(batch["labels"] != -100).sum() for batch in batches]
    total = accelerator.reduce(torch.stack(counts).sum(), reduction="sum")
    for batch, count in zip(batches, counts, strict=True):
        with accelerator.accumulate(model):
            logits = model(batch["input_ids"])
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            if not without:
                loss = gm.objective(loss, weights=count, total=total, ddp=model)
                loss = loss * accelerator.gradient_accumulation_steps  # backward divides by it
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), sys.argv[1])
accelerator.end_training()
