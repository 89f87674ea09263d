"""Fully sharded data parallelism (ZeRO stage 3) with gradmesh's verbs, compared with torch's FSDP and one process.

    python examples/sharded.py                                  # 4 local ranks
    torchrun --nproc-per-node 4 examples/sharded.py             # ranks started by torchrun

Each rank holds a shard of every layer's parameters and of the optimizer's state. `all_gather` gathers a layer's
parameters while it runs, `checkpoint` frees them and gathers them again in backward, and the adjoint of the gather, a
reduce-scatter, gives each rank the summed gradient of its shard.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import gradmesh as gm


class Sharded(nn.Module):
    """A module with sharded parameters: each rank has a slice of the flattened, concatenated parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        named = list(module.named_parameters())
        self.names, self.shapes = [name for name, _ in named], [each.shape for _, each in named]
        flat = torch.cat([each.detach().flatten() for _, each in named])
        self.own = nn.Parameter(gm.shard(flat).clone())
        self.sizes = gm.sizes(self.own)
        self.shell = [
            copy.deepcopy(module).to("meta")
        ]  # in a list, so that its parameters are not registered

    def forward(self, x: Tensor) -> Tensor:
        """The module's output."""
        made: Tensor = checkpoint(self._whole, x, self.own, use_reentrant=False)
        return made

    def _whole(self, x: Tensor, own: Tensor) -> Tensor:
        parameters = self.split(gm.all_gather(own, sizes=self.sizes))
        made: Tensor = torch.func.functional_call(self.shell[0], parameters, (x,))
        return made

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Split a flat tensor into one tensor for each parameter."""
        parts = flat.split([shape.numel() for shape in self.shapes])
        return {
            name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def whole(self, own: Tensor) -> dict[str, Tensor]:
        """The full parameters, or the full optimizer state, on every rank."""
        return self.split(gm.all_gather(own.detach(), sizes=self.sizes))


def model(width: int) -> nn.Sequential:
    """A model of three layers."""
    layers = (nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)) for _ in range(3))
    return nn.Sequential(*layers)


def wrapped(kind: str, whole: nn.Sequential) -> nn.Module:
    """A copy of the model, sharded in one of three ways, or not sharded."""
    made = copy.deepcopy(whole)
    if kind == "verbs":
        return nn.Sequential(*(Sharded(layer) for layer in made))
    if kind == "FullyShardedDataParallel":
        return FullyShardedDataParallel(made, device_id=torch.device("cpu"))
    if kind == "fully_shard":
        for layer in (*made, made):
            fully_shard(layer, mesh=gm.mesh(dp=-1))
    return made


def clip(made: nn.Module, kind: str, limit: float) -> float:
    """Clip the gradients by the norm over all ranks' shards, and return the norm."""
    if kind == "verbs":
        grads = [each.grad for each in made.parameters() if each.grad is not None]
        norm = gm.all_reduce(torch.stack([grad.square().sum() for grad in grads]), dst=gm.I).sum().sqrt()
        for grad in grads:
            grad.mul_((limit / norm).clamp(max=1.0))
        return norm.item()
    if isinstance(made, FullyShardedDataParallel):
        return made.clip_grad_norm_(limit).item()
    found = nn.utils.clip_grad_norm_(made.parameters(), limit)
    return (found.full_tensor() if isinstance(found, DTensor) else found).item()


def train(kind: str, whole: nn.Sequential, steps: int) -> list[tuple[float, float]]:
    """The losses and gradient norms, step by step."""
    gm.init()
    width = next(whole.parameters()).shape[1]
    made, axis = wrapped(kind, whole), gm.axis()
    optimizer, results = torch.optim.AdamW(made.parameters(), lr=1e-2), []
    for step in range(steps):
        rows = torch.randn(48, width, generator=torch.Generator().manual_seed(step))
        local = rows[axis.slice(len(rows))]
        # torch's wrappers average the ranks' gradients; the verbs sum them.
        scale = 1.0 if kind == "verbs" else axis.size
        loss = scale * (made(local) - local.roll(1, 1)).square().sum() / rows.numel()
        optimizer.zero_grad()
        loss.backward()
        norm = clip(made, kind, 0.1)
        optimizer.step()
        results.append((gm.all_reduce(loss.detach() / scale, dst=gm.I).item(), norm))
    return results


KINDS = ("verbs", "FullyShardedDataParallel", "fully_shard")


def main() -> None:
    """Train in each way and on one process, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="number of local ranks, without torchrun")
    parser.add_argument("--backend", help="shm or gloo; threads trains with the verbs only")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = model(args.width)
    kinds = KINDS[:1] if args.backend == "threads" else KINDS
    if "RANK" in os.environ:
        gm.init(args.backend)
        found, chief = [train(kind, made, args.steps) for kind in kinds], gm.rank() == 0
        torch.distributed.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    else:
        with gm.Ranks(args.ranks, args.backend) as ranks:
            found, chief = [ranks.run(train, kind, made, args.steps)[0] for kind in kinds], True
    if not chief:
        return
    (one,) = gm.launch(train, 1, backend="threads", args=("whole", made, args.steps))
    for kind, steps in zip(kinds, found, strict=True):
        far = (torch.tensor(steps) - torch.tensor(one)).abs().max().item()
        print(f"{kind}: loss {steps[0][0]:.4f} -> {steps[-1][0]:.4f}; the furthest step differs by {far:.0e}")


if __name__ == "__main__":
    main()
