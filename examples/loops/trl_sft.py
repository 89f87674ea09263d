"""TRL's SFTTrainer, with a loss of your own in `compute_loss`.

$ torchrun --nproc-per-node 2 examples/loops/trl_sft.py weights.pt
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import tiny
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import gradmesh as gm

without = "--without" in sys.argv  # SFTTrainer's own loss, for comparison


class OwnLoss(SFTTrainer):
    """An SFTTrainer with its own loss: `num_items_in_batch` counts the labels of all ranks and micro-batches."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, num_items_in_batch: Any = None) -> Any:
        if without:
            return super().compute_loss(model, inputs, *given, num_items_in_batch=num_items_in_batch)
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        return gm.objective(loss, weights=(labels != -100).sum(), total=num_items_in_batch, ddp=model)

    def get_train_dataloader(self) -> Any:
        own = tiny.micro_batches(self.args.process_index, self.args.world_size)
        masked = [{**batch, "attention_mask": torch.ones_like(batch["input_ids"])} for batch in own]
        return DataLoader(masked, batch_size=None)  # type: ignore[arg-type]


words = Tokenizer(models.WordLevel({str(number): number for number in range(tiny.WORDS)}, unk_token="0"))
own = {**tiny.TRANSFORMERS, "bf16": False, "gradient_checkpointing": False}
given = SFTConfig(tempfile.mkdtemp(), gradient_accumulation_steps=2, **own)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
rows = Dataset.from_list([{"input_ids": [1, 2]}])  # not used: the loader has its own
trainer = OwnLoss(tiny.language_model(), given, train_dataset=rows, processing_class=tokenizer)
gm.init(backend="gloo")  # in one process transformers makes no process group
trainer.train()
if trainer.is_world_process_zero():
    torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), sys.argv[1])
