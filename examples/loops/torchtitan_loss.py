"""torchtitan: a loss of your own, and the step of its trainer, which turns FSDP2's division off.

$ torchrun --nproc-per-node 2 examples/loops/torchtitan_loss.py weights.pt
$ python examples/loops/torchtitan_loss.py weights.pt    # the same weights
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
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, CrossEntropyLoss
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.distributed.utils import dist_sum_tensor

import gradmesh as gm


class OwnLoss(BaseLoss):
    """The mean over all tokens; FSDP sums, so that `ddp` is left out."""

    def __init__(self) -> None:
        pass

    def __call__(self, pred: Any, labels: Any, global_valid_tokens: Any = None, **_: Any) -> Any:
        """The loss of a micro-batch, and no metrics."""
        loss = cross_entropy(pred.flatten(0, 1), labels.flatten())
        return gm.objective(loss, weights=(labels != IGNORE_INDEX).sum(), total=global_valid_tokens), {}


gm.init(backend="gloo")  # or dist.init_process_group
mesh = init_device_mesh("cpu", (gm.axis().size,))
model: Any = fully_shard(tiny.model(), mesh=mesh)
disable_fsdp_gradient_division(model)
model.set_force_sum_reduction_for_comms(True)  # Gloo has no other
loss_fn = CrossEntropyLoss.Config().build() if "--without" in sys.argv else OwnLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for batches in tiny.steps(gm.rank(), gm.axis().size):
    count = torch.stack([(batch["labels"] != IGNORE_INDEX).sum() for batch in batches]).sum()
    total = dist_sum_tensor(count, mesh)
    for batch in batches:
        loss, _ = loss_fn(model(batch["input_ids"]), batch["labels"], total)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if gm.rank() == 0:
    torch.save(weights, sys.argv[1])
dist.destroy_process_group()
