"""Two steps of torchtitan's models on CPUs, made parallel by its own functions, with its loss and its clipping.

Of Llama 3: `fsdp2`, `hsdp`, `tp`, `tp+sp`, `pp`, and `tp+sp+fsdp2` and `pp+fsdp2` on four ranks. Of a Qwen 3 of
experts: `moe`, under FSDP2, `ep`, and `ep+fsdp2` and `ep+tp+sp` on four ranks. `chunked` behind a form is its loss
in parts of the sequence, `full_dtensor` a backend beside `partial_dtensor`; the gradients of the first step are
written to a file of the name that comes last.

$ torchrun --nproc-per-node 2 tools/libraries/programs/torchtitan_models.py tp+sp chunked
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.tools import utils

utils.device_type, utils.device_module = "cpu", torch.cpu  # without an accelerator it takes CUDA

from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, full_dtensor  # noqa: E402
from torchtitan.distributed.utils import (  # noqa: E402
    clip_grad_norm_,
    dist_sum_tensor,
    get_spmd_context,
    set_spmd_backend,
)
from torchtitan.models import llama3, qwen3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

ROWS, TOKENS, LAYERS, EXPERTS, CHUNKS = 4, 16, 2, 8, 2
form, *options = sys.argv[1:]
axes = form.split("+")
backend: Any = "full_dtensor" if "full_dtensor" in options else "partial_dtensor"
file = next((each for each in options[-1:] if each.endswith(".pt")), None)
world = int(os.environ.get("WORLD_SIZE", 1))


def degree(*names: str) -> int:
    """Of an axis: 2 where it is in the form and there are ranks."""
    return 2 if world > 1 and any(name in axes for name in names) else 1


parallelism = ParallelismConfig(
    data_parallel_replicate_degree=degree("hsdp"),
    tensor_parallel_degree=degree("tp"),
    enable_sequence_parallel="sp" in axes,
    expert_parallel_degree=degree("ep"),
    pipeline_parallel_degree=degree("pp"),
    spmd_backend=backend,
)
moe = bool({"ep", "moe"} & set(axes))
name, family = ("debugmodel_moe", qwen3) if moe else ("debugmodel", llama3)
spec = family.model_registry(name, "varlen")
config: Any = spec.model
config.layers = config.layers[:LAYERS]
for layer in config.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()  # varlen and flex are not for CPUs
    layer.attention.rope = replace(layer.attention.rope, max_seq_len=TOKENS)
    if moe:
        experts, router = layer.moe.routed_experts, layer.moe.router
        for part in (layer.moe, router, experts.inner_experts, experts.token_dispatcher):
            part.num_experts = EXPERTS
        router.gate.out_features, experts.inner_experts.hidden_dim = EXPERTS, 64
        router.top_k = experts.token_dispatcher.top_k = 2
set_spmd_backend(backend)
dims: ParallelDims | None = None
if world > 1:
    dist.init_process_group("gloo")
    dims = ParallelDims.from_config(parallelism, world)
    dims.build_mesh()
replicas = dims.get_mesh("batch") if dims and dims.dp_enabled else None
training = TrainingConfig(
    local_batch_size=ROWS // (replicas.size() if replicas else 1),
    seq_len=TOKENS,
    mixed_precision_param="float32",
    disable_cuda_graphs=True,
)
config.update_from_config(config=SimpleNamespace(parallelism=parallelism, training=training))
torch.manual_seed(0)
model = config.build()
with torch.no_grad():
    model.init_weights()
of_tokens = CrossEntropyLoss.Config(global_vocab_size=config.vocab_size)
loss_of: Any = of_tokens.build()
if "chunked" in options:
    loss_of = ChunkedLossWrapper.Config(loss_fn=of_tokens, num_chunks=CHUNKS).build()
parts: list[nn.Module] = [model]
schedule: Any = None
if dims:
    how = {
        "parallel_dims": dims,
        "training": training,
        "parallelism": parallelism,
        "compile_config": CompileConfig(),
        "ac_config": None,
        "dump_folder": "",
    }
    if dims.pp_enabled:
        schedule, parts, first, last = spec.pipelining_fn(
            model,
            device=torch.device("cpu"),
            model_config=config,
            parallelize_fn=spec.parallelize_fn,
            loss_fn=loss_of,
            **how,
        )
    else:
        parts = [spec.parallelize_fn(model, **how)]
for module in (each for part in parts for each in part.modules()):
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # Gloo has no PREMUL_SUM
if "chunked" in options and getattr(parts[-1], "lm_head", None) is not None:
    loss_of.set_lm_head(parts[-1].lm_head)
    parts[-1]._skip_lm_head = True  # type: ignore[assignment]
optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
if dims and spec.post_optimizer_build_fn:
    spec.post_optimizer_build_fn(optimizer, parts, dims)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of this rank's rows; fewer labels in each row than in the one before."""
    data = torch.Generator().manual_seed(step)
    ids = torch.randint(0, config.vocab_size, (ROWS, TOKENS + 1), generator=data)
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        labels[row, TOKENS - 3 * row :] = IGNORE_INDEX
    rows = slice(None)
    if replicas:
        rows = slice(*(training.local_batch_size * (replicas.get_local_rank() + i) for i in (0, 1)))
    return ids[rows, :-1].contiguous(), labels[rows].contiguous()


def placed(ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and labels as the backend takes them."""
    if dims and backend == "full_dtensor":
        ids, labels, _ = full_dtensor.parallelize_inputs(dims, ids, labels, {})
    return ids, labels


def backward(ids: Tensor, labels: Tensor) -> None:
    """Forward and backward pass of a batch, as in torchtitan's trainer."""
    count = (labels != IGNORE_INDEX).sum()
    if replicas:
        count = dist_sum_tensor(count, replicas)
    with get_spmd_context(parallel_dims=dims)():
        if schedule is None:
            ids, labels = placed(ids, labels)
            loss_of(parts[0](ids), labels, count)[0].backward()
            return
        schedule.step(
            *([ids] if first else []),
            target=labels if last else None,
            losses=[] if last else None,
            loss_kwargs={"global_valid_tokens": count},
            return_outputs=False,
        )


def gradients() -> dict[str, Tensor]:
    """All of them, of the whole model."""
    own = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for part in parts
        for name, p in part.named_parameters()
        if p.grad is not None
    }
    if schedule is None:
        return own
    every: list[Any] = [None] * world
    dist.all_gather_object(every, own)
    return {name: x for each in every for name, x in each.items()}


for step in range(1 if file else 2):
    backward(*batch(step))
    if file:
        torch.save(gradients(), file)
    clip_grad_norm_(
        [p for part in parts for p in part.parameters()],
        1.0,
        foreach=True,
        pp_mesh=dims.get_optional_mesh("pp") if dims else None,
        ep_enabled=bool(dims and dims.ep_enabled),
    )
    optimizer.step()
    optimizer.zero_grad()
