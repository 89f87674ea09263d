"""transformers' Trainer, with a loss of your own in `compute_loss`.

$ torchrun --nproc-per-node 2 examples/loops/transformers_trainer.py weights.pt
$ python examples/loops/transformers_trainer.py weights.pt    # the same weights
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import tiny
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import gradmesh as gm

without = "--without" in sys.argv  # the mean of the means, for comparison


class OwnLoss(Trainer):
    """A Trainer with its own loss: `num_items_in_batch` counts the labels of all ranks and micro-batches."""

    loss_is_scaled_for_ga = not without  # if not, training_step divides by the micro-batches of a step

    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Tensor:
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        if without:
            return loss
        count = (labels != -100).sum()
        return gm.objective(loss, weights=count, total=num_items_in_batch, ddp=model)

    def get_train_dataloader(self) -> Any:
        own = tiny.micro_batches(self.args.process_index, self.args.world_size)
        return DataLoader(own, batch_size=None)  # type: ignore[arg-type]


model = tiny.language_model()
given = TrainingArguments(tempfile.mkdtemp(), gradient_accumulation_steps=2, **tiny.TRANSFORMERS)
trainer = OwnLoss(model, given)
gm.init(backend="gloo")  # in one process transformers makes no process group
trainer.train()
if trainer.is_world_process_zero():
    torch.save(model.state_dict(), sys.argv[1])
