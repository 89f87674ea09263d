"""The trainers of TRL, on texts of different lengths, two micro-batches a step."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import trl
import words
from datasets import Dataset

kind, *forms = sys.argv[1:]


def rows(*names: str) -> Any:
    """Texts for each name."""
    count = len(names)
    return Dataset.from_list(
        [{name: words.text(count * row + at) for at, name in enumerate(names)} for row in range(16)]
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    """A number that depends on every character."""
    return [float(sum(map(ord, each)) % 7) for each in completions]


plain = {"gradient_checkpointing": False, "bf16": False}
if kind == "sft":
    more = {"packing": True, "max_length": 16} if "packing" in forms else {}
    own = words.arguments(trl.SFTConfig, **plain, **more)
    data, made = rows("text"), [words.model()]
    trainer = trl.SFTTrainer
elif kind == "dpo":
    own, data = words.arguments(trl.DPOConfig, **plain), rows("prompt", "chosen", "rejected")
    made, trainer = [words.model(), words.model()], trl.DPOTrainer
else:
    folder = tempfile.mkdtemp()
    words.model().save_pretrained(folder)
    words.tokenizer().save_pretrained(folder)
    own = words.arguments(
        trl.GRPOConfig,
        **plain,
        num_generations=2,
        max_completion_length=8,
        loss_type=forms[0],
        beta=0.04,
        model_init_kwargs={"dtype": "float32"},
    )
    data, made, trainer = rows("prompt"), [folder, reward], trl.GRPOTrainer
trainer(*made, own, train_dataset=data, processing_class=words.tokenizer()).train()
