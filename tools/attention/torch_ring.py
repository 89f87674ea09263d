"""torch's own ring attention, with the fused kernels for a CPU, for which its public `context_parallel` has no rule."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OPS = torch.ops.aten


class TorchRing(torch.autograd.Function):
    """What `context_parallel` runs on a GPU, called by its private name."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, balanced: bool) -> Tensor:
        """Attend to the keys of all ranks; balanced is what the zigzag order is here."""
        from torch.distributed.tensor.experimental import _attention as ring

        ring._cp_options.enable_load_balance = balanced
        group: Any = dist.group.WORLD
        op: Any = _OPS._scaled_dot_product_flash_attention_for_cpu
        out, lse = ring._templated_ring_attention(group, 2, op, q, k, v, is_causal=causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.balanced = causal, balanced
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of this rank's queries, keys and values."""
        from torch.distributed.tensor.experimental import _attention as ring
        from torch.distributed.tensor.experimental._context_parallel import _attention as inside

        ring._cp_options.enable_load_balance = ctx.balanced
        q, k, v, out, lse = ctx.saved_tensors
        op: Any = _OPS._scaled_dot_product_flash_attention_for_cpu_backward
        group: Any = dist.group.WORLD
        grads = inside._templated_ring_attention_backward(
            group, 2, op, grad, "grad_out", q, k, v, out, lse, ctx.causal, dropout_p=0.0
        )
        return *grads[:3], None, None
