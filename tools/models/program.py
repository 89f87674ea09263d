"""A tiny model with random weights, trained for two steps under a parallel plan of transformers.

$ python tools/models/program.py make FAMILY FOLDER
$ gradmesh check -n 2 tools/models/program.py -- train FOLDER PLAN [FAULT SEED]
$ python tools/models/program.py gradients FOLDER PLAN FILE   # of the first step, from each rank that is started
"""

from __future__ import annotations

import functools
import os
import random
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_WORDS: dict[str, Any] = {
    **_LAYERS,
    "vocab_size": 64,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_PIXELS = {**_LAYERS, "image_size": 16, "patch_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _WORDS,
    "qwen3": {"head_dim": 8, **_WORDS},
    "mixtral": {**_WORDS, **_EXPERTS},
    "olmoe": {**_WORDS, **_EXPERTS},
    "qwen3_moe": {"head_dim": 8, **_WORDS, **_EXPERTS},
    "gpt_oss": {"head_dim": 8, "sliding_window": 8, **_WORDS, **_EXPERTS},
    "deepseek_v3": {"num_experts_per_tok": 2, "moe_intermediate_size": 48, **_WORDS, **_ROUTED, **_LATENT},
    "vit": {**_PIXELS, "num_labels": 4},
    "clip": {"text_config": _WORDS, "vision_config": _PIXELS, "projection_dim": 16},
}
"""The configuration of each family's model."""
PLANS: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2, "tp_plan": "auto"},
    "ep": {"tp_size": 2, "tp_plan": {}, "ep_size": 2},
    "tp+ep": {"tp_size": 2, "tp_plan": "auto", "ep_size": 2},
    "fsdp2": {"fsdp_size": 2},
    "ep+fsdp2": {"fsdp_size": 2, "ep_size": 2},
    "tp+fsdp2": {"tp_size": 2, "tp_plan": "auto", "fsdp_size": 2},
    "hsdp": {"fsdp_size": 2, "dp_replicate_size": 2},
}
"""The arguments of `DistributedConfig`."""


def replicas(plan: str) -> int:
    """How many ranks have data of their own."""
    how = PLANS[plan]
    return int(how.get("fsdp_size", 1) * how.get("dp_replicate_size", 1))


def _class_of(family: str) -> Any:
    import transformers

    names = {"vit": "AutoModelForImageClassification", "clip": "CLIPModel"}
    return getattr(transformers, names.get(family, "AutoModelForCausalLM"))


def make(family: str, folder: str) -> None:
    """Write a checkpoint."""
    from transformers import AutoConfig

    kind, config = _class_of(family), AutoConfig.for_model(family, **FAMILIES[family])
    torch.manual_seed(0)
    (kind.from_config if hasattr(kind, "from_config") else kind)(config).save_pretrained(folder)


def _model(folder: str, plan: str) -> Any:
    from transformers import AutoConfig

    given: dict[str, Any] = {"dtype": torch.float32}
    if "RANK" in os.environ:
        from transformers.distributed import DistributedConfig

        dist.init_process_group("gloo")
        how = PLANS[plan]
        if "ep_size" in how and "ep_size" not in {each.name for each in fields(DistributedConfig)}:
            if plan != "ep":
                raise ValueError(
                    "this release has no ep_size: expert parallelism takes the place of tensor parallelism"
                )
            how = {"tp_size": 2, "tp_plan": "auto", "enable_expert_parallel": True}
        given["distributed_config"] = DistributedConfig(**how)
    family = AutoConfig.from_pretrained(folder).model_type
    return _class_of(family).from_pretrained(folder, **given).train()


def _loss(model: Any, step: int, replica: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(10 * step + replica)
    given: dict[str, Any] = {}
    if model.config.model_type in ("vit", "clip"):
        given["pixel_values"] = torch.randn(
            2, 3, _PIXELS["image_size"], _PIXELS["image_size"], generator=data
        )
    if model.config.model_type == "vit":
        given["labels"] = torch.randint(0, model.config.num_labels, (2,), generator=data)
    else:
        given["input_ids"] = torch.randint(0, _WORDS["vocab_size"], (2, 8), generator=data)
        given |= {"return_loss": True} if "pixel_values" in given else {"labels": given["input_ids"]}
    loss: torch.Tensor = model(**given).loss
    return loss


FAULTS = ("doubled", "dropped", "unreduced")


class _Fault:
    """Makes a random collective of the second backward wrong, alike on all ranks: the first backward counts them.

    Args:
        kind: what becomes of its result: doubled, zero, or what this rank handed in.
        seed: of the choice.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self._seed = kind, seed
        self.inside, self.count, self.chosen, self.place = False, 0, -1, ""
        for module, name in (
            (dist, "all_reduce"),
            (dist, "reduce_scatter_tensor"),
            (dist, "reduce_scatter_single"),  # what FSDP2 calls, with keywords
            (functional, "all_reduce"),
            (functional, "reduce_scatter_tensor"),
        ):
            setattr(module, name, self._wrapped(module is dist, getattr(module, name)))

    def begins(self, step: int) -> None:
        """A backward begins."""
        if step == 1:
            if not self.count:
                raise ValueError("no collective of the backward was seen: there is nothing to make wrong")
            self.chosen = random.Random(self._seed).randrange(self.count)
        self.inside, self.count = True, 0

    def _wrapped(self, in_place: bool, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else kwargs["output" if "output" in kwargs else "tensor"]
            mine = self.inside and self.count == self.chosen
            self.count += self.inside
            before = x.detach().clone() if mine and isinstance(x, torch.Tensor) else x
            result = original(*args, **kwargs)
            if mine:
                self.place = f"{original.__name__} of {tuple(x.shape)}"
                made = x if in_place else result
                if (
                    self.kind == "unreduced"
                    and made.shape == before.shape
                    and original.__name__ == "all_reduce"
                ):
                    made.copy_(before)
                else:
                    made.mul_(2.0 if self.kind == "doubled" else 0.0)
            return result

        return call


def train(folder: str, plan: str, kind: str = "", seed: str = "0") -> None:
    """Two steps, whose gradients are checked."""
    model = _model(folder, plan)
    fault = _Fault(kind, int(seed)) if kind else None
    replica = dist.get_rank() // PLANS[plan].get("tp_size", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = _loss(model, step, replica)
        if fault:
            fault.begins(step)
        loss.backward()
        if fault:
            fault.inside = False
        optimizer.step()
        optimizer.zero_grad()


def gradients(folder: str, plan: str, file: str) -> None:
    """Write the first step's gradients, whole; by one process those of the mean over all replicas."""
    model, how = _model(folder, plan), PLANS[plan]
    if "RANK" in os.environ:
        _loss(model, 0, dist.get_rank() // how.get("tp_size", 1)).backward()
    else:
        torch.stack([_loss(model, 0, replica) for replica in range(replicas(plan))]).mean().backward()
    found = {}
    for name, p in model.named_parameters():
        g: Any = torch.zeros_like(p) if p.grad is None else p.grad
        found[name] = (g.full_tensor() if hasattr(g, "full_tensor") else g).detach().clone()
    torch.save(found, Path(file))


if __name__ == "__main__":
    commands: dict[str, Any] = {"make": make, "train": train, "gradients": gradients}
    commands[sys.argv[1]](*sys.argv[2:])
