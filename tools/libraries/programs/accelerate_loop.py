"""The loop of accelerate's guide to accumulation over batches of different sizes: one count of tokens for the step."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import words
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.nn import functional
from torch.utils.data import DataLoader

PASSES = 2
plugin = (
    FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    if "fsdp2" in sys.argv
    else None
)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PASSES, fsdp_plugin=plugin)
tokenizer = words.tokenizer()
rows = [tokenizer(words.text(row), return_tensors="pt")["input_ids"][0] for row in range(16)]


def collate(some: list[torch.Tensor]) -> torch.Tensor:
    """Pad the rows to one length."""
    return torch.nn.utils.rnn.pad_sequence(some, batch_first=True)


made: Any = words.model()
model, optimizer, loader = accelerator.prepare(
    made, torch.optim.SGD(made.parameters(), lr=0.1), DataLoader(rows, batch_size=2, collate_fn=collate)
)
batches = iter(loader)
for _ in range(2):
    parts = [next(batches) for _ in range(PASSES)]
    own = torch.stack([(ids[:, 1:] != 0).sum() for ids in parts]).sum()
    count = accelerator.gather(own).sum().item()
    for at, ids in enumerate(parts):
        with accelerator.no_sync(model) if at < PASSES - 1 else contextlib.nullcontext():
            logits = model(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, :-1]
            targets = ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            accelerator.backward(loss * PASSES * accelerator.num_processes / count)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
