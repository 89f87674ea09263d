"""The models and the uneven micro-batches of the loops in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
WORDS, LENGTH = 13, 6
PASSES = 2  # micro-batches of a step
ROWS = (3, 1), (2, 2), (1, 4), (2, 3)  # of each micro-batch, on each of two ranks
EMPTY = 1, 1  # the micro-batch, and the rank on which none of its labels counts

LIGHTNING: dict[str, Any] = {
    "accelerator": "cpu",
    "strategy": "ddp",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
}
_SGD = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
_QUIET = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
TRANSFORMERS: dict[str, Any] = {"max_steps": 2, **_SGD, **_QUIET}


def model() -> nn.Module:
    """Logits for each token, in double precision, so that differences are not those of rounding."""
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, WORDS)
    return nn.Sequential(*layers).double()


def language_model() -> Any:
    """A Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).double()


def micro_batches(rank: int, ranks: int) -> list[Batch]:
    """This rank's, of all steps; one process gets the rows of both ranks. A label of -100 does not count."""
    found = []
    for at, rows in enumerate(ROWS):
        data = torch.Generator().manual_seed(at)
        ids = torch.randint(WORDS, (sum(rows), LENGTH), generator=data)
        labels = torch.where(torch.rand(ids.shape, generator=data) < 0.5, ids.roll(1, 1), -100)
        labels[:, 0] = -100
        if at == EMPTY[0]:
            labels.split(rows)[EMPTY[1]].fill_(-100)
        parts = {"input_ids": ids.split(rows), "labels": labels.split(rows)}
        mine = slice(None) if ranks == 1 else slice(rank, rank + 1)
        found.append({name: torch.cat(part[mine]) for name, part in parts.items()})
    return found


def steps(rank: int, ranks: int) -> Iterator[list[Batch]]:
    """The micro-batches of each step."""
    every = micro_batches(rank, ranks)
    for at in range(0, len(every), PASSES):
        yield every[at : at + PASSES]
