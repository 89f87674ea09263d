"""DeepSpeed's engine on CPUs: a stage of ZeRO, two micro-batches a step, gradients clipped."""

from __future__ import annotations

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from torch import nn

PASSES = 2
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
deepspeed.init_distributed(dist_backend="gloo")
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": PASSES,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": int(sys.argv[1])},
        "zero_allow_untested_optimizer": True,
    },
)
data = torch.Generator().manual_seed(torch.distributed.get_rank())
for _ in range(2 * PASSES):
    engine.backward(engine(torch.randn(3, 6, generator=data)).square().mean())
    engine.step()
