"""transformers' Trainer, on texts of different lengths, two micro-batches a step."""

from __future__ import annotations

import words
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

tokenizer = words.tokenizer()
data = [{"input_ids": tokenizer(words.text(row))["input_ids"]} for row in range(16)]
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
Trainer(words.model(), words.arguments(TrainingArguments), collate, data).train()
