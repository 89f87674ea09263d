"""LoRA and DoRA adapters of peft under DDP and FSDP2."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import words
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
adapters = LoraConfig(
    r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", use_dora="dora" in sys.argv
)
model = get_peft_model(words.model(), adapters)
if "fsdp2" in sys.argv:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
data = torch.Generator().manual_seed(dist.get_rank())
for _ in range(2):
    ids = torch.randint(4, 32, (2, 8), generator=data)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
