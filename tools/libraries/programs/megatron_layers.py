"""Tensor and sequence parallel layers and the cross entropy of megatron-core, on CPUs."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

dist.init_process_group("gloo")
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[method-assign,assignment,return-value]  # it asks
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402

split = "sequence-parallel" in sys.argv
parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
config = ModelParallelConfig(
    tensor_model_parallel_size=dist.get_world_size(),
    use_cpu_initialization=True,
    sequence_parallel=split,
    params_dtype=torch.float32,
)
layer = {"config": config, "init_method": nn.init.xavier_normal_}


class Block(nn.Module):
    """An embedding, a norm, two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = tensor_parallel.VocabParallelEmbedding(16, 8, reduce_scatter_embeddings=split, **layer)
        self.norm = nn.LayerNorm(8)
        self.up = tensor_parallel.ColumnParallelLinear(8, 16, gather_output=False, **layer)
        self.down = tensor_parallel.RowParallelLinear(
            16, 8, bias=True, input_is_parallel=True, skip_bias_add=False, **layer
        )
        self.head = tensor_parallel.ColumnParallelLinear(8, 16, bias=False, gather_output=False, **layer)

    def forward(self, ids: Tensor) -> Tensor:
        """The logits of this rank's part of the vocabulary."""
        x = self.embed(ids)
        if not split:
            x = x.transpose(0, 1).contiguous()
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))[0]))[0]
        logits: Tensor = self.head(x)[0]
        return logits


torch.manual_seed(0)
model = Block()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(0)
for _ in range(2):
    ids = torch.randint(0, 16, (2, 4), generator=data)
    tensor_parallel.vocab_parallel_cross_entropy(model(ids), ids.t().contiguous()).mean().backward()
    for parameter in (*model.norm.parameters(), model.down.bias) if split else ():
        dist.all_reduce(parameter.grad)  # finalize_model_grads does it in Megatron's training
    optimizer.step()
    optimizer.zero_grad()
