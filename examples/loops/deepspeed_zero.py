"""DeepSpeed: ZeRO stage 1, or 2.

$ torchrun --nproc-per-node 2 examples/loops/deepspeed_zero.py weights.pt 2
$ torchrun --nproc-per-node 1 examples/loops/deepspeed_zero.py weights.pt 2    # the same weights
"""

from __future__ import annotations

import sys

import deepspeed
import tiny
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import gradmesh as gm

without = "--without" in sys.argv  # the mean of the means, for comparison
path, stage = sys.argv[1], int(sys.argv[2])
deepspeed.init_distributed(dist_backend="gloo")
plain = tiny.model()
engine, *_ = deepspeed.initialize(
    model=plain,
    optimizer=torch.optim.SGD(plain.parameters(), lr=0.5),
    config={
        "train_micro_batch_size_per_gpu": 1,  # only counted; batches are passed by hand
        "gradient_accumulation_steps": tiny.PASSES,
        "gradient_clipping": 0.0,  # 1.0 by default
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    },
)
for batches in tiny.steps(dist.get_rank(), dist.get_world_size()):
    counts = [(batch["labels"] != -100).sum() for batch in batches]
    total = torch.stack(counts).sum()
    dist.all_reduce(total)
    for batch, count in zip(batches, counts, strict=True):
        logits = engine(batch["input_ids"])
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        if without:
            engine.backward(loss)
        else:
            loss = gm.objective(
                loss, weights=count, total=total, ddp=True
            )  # the engine is not a wrapper of torch's
            engine.backward(loss, scale_wrt_gas=False)
        engine.step()
if dist.get_rank() == 0:
    torch.save(plain.state_dict(), path)
dist.destroy_process_group()
