"""A tiny language model with random weights, its tokenizer, texts of different lengths, and a trainer's arguments."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import images  # noqa: F401 - before transformers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_WORDS = 28


def tokenizer() -> Any:
    """A tokenizer of words."""
    names = [*_SPECIAL.values(), *(f"w{number}" for number in range(_WORDS))]
    words = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **_SPECIAL)


def model() -> Any:
    """A model, alike on every rank."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": _WORDS + len(_SPECIAL),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def text(number: int) -> str:
    """From two to twelve words."""
    draw = random.Random(number)
    return " ".join(f"w{draw.randrange(_WORDS)}" for _ in range(draw.randint(2, 12)))


def arguments(kind: Any, **more: Any) -> Any:
    """Two steps of two micro-batches."""
    given = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
    }
    return kind(**given, **more)
