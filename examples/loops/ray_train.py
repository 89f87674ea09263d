"""Ray Train: the loop of a TorchTrainer, DDP.

$ python examples/loops/ray_train.py weights.pt 2    # ranks
$ python examples/loops/ray_train.py weights.pt 1    # the same weights
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import tiny
import torch
from ray.train import ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch.nn.functional import cross_entropy

import gradmesh as gm


def train(given: dict[str, Any]) -> None:
    """On each worker."""
    rank, ranks = get_context().get_world_rank(), get_context().get_world_size()
    plain = tiny.model()
    model = prepare_model(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batches in tiny.steps(rank, ranks):
        counts = [(batch["labels"] != -100).sum() for batch in batches]
        total = gm.all_reduce(torch.stack(counts).sum(), dst=gm.I)
        for at, (batch, count) in enumerate(zip(batches, counts, strict=True)):
            accumulates = ranks > 1 and at < len(batches) - 1  # one worker has no wrapper
            with model.no_sync() if accumulates else contextlib.nullcontext():
                logits = model(batch["input_ids"])
                loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                if given["without"]:  # the mean of the means, for comparison
                    loss = loss / len(batches)
                else:
                    loss = gm.objective(loss, weights=count, total=total, ddp=model)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        torch.save(plain.state_dict(), given["path"])


TorchTrainer(
    train,
    train_loop_config={"path": sys.argv[1], "without": "--without" in sys.argv},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=int(sys.argv[2])),
).fit()
