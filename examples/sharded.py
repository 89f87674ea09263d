"""Sharded training in the verbs alone (ZeRO, stage 3), beside both of torch's and one process.

    python examples/sharded.py                                  # 4 ranks here
    torchrun --nproc-per-node 4 examples/sharded.py             # ranks that torchrun starts

Each rank holds a part of every layer's parameters, and of the optimizer's state. A layer is whole for as long as it
runs: `all_gather` brings the parts together, `checkpoint` lets go of them and gathers them again in backward, and the
adjoint of the gather, a reduce_scatter, gives each rank the sum of its own part's gradient.
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
    """A module of which each rank keeps a part: of all its parameters, laid end to end, its own slice."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        named = list(module.named_parameters())
        self.names, self.shapes = [name for name, _ in named], [each.shape for _, each in named]
        flat = torch.cat([each.detach().flatten() for _, each in named])
        self.own = nn.Parameter(gm.shard(flat).clone())
        self.sizes = gm.sizes(self.own)
        self.shell = [copy.deepcopy(module).to("meta")]  # hidden in a list: its parameters are none of ours

    def forward(self, x: Tensor) -> Tensor:
        """What the module makes of x."""
        made: Tensor = checkpoint(self._whole, x, self.own, use_reentrant=False)
        return made

    def _whole(self, x: Tensor, own: Tensor) -> Tensor:
        parameters = self.split(gm.all_gather(own, sizes=self.sizes))
        made: Tensor = torch.func.functional_call(self.shell[0], parameters, (x,))
        return made

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters, or whatever else there is for each of them, out of what lies end to end."""
        parts = flat.split([shape.numel() for shape in self.shapes])
        return {
            name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def whole(self, own: Tensor) -> dict[str, Tensor]:
        """The parameters, or what an optimizer keeps for each of them, on every rank."""
        return self.split(gm.all_gather(own.detach(), sizes=self.sizes))


def model(width: int) -> nn.Sequential:
    """Some layers."""
    layers = (nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)) for _ in range(3))
    return nn.Sequential(*layers)


def wrapped(kind: str, whole: nn.Sequential) -> nn.Module:
    """A copy of the model, sharded in one of three ways, or whole."""
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
    """Scale the gradients to a norm over all ranks' parts, and return what it was."""
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
    """The losses and the norms of the gradients, step by step."""
    gm.init()
    width = next(whole.parameters()).shape[1]
    made, axis = wrapped(kind, whole), gm.axis()
    optimizer, told = torch.optim.AdamW(made.parameters(), lr=1e-2), []
    for step in range(steps):
        rows = torch.randn(48, width, generator=torch.Generator().manual_seed(step))
        own = rows[axis.slice(len(rows))]
        # torch's wrappers take the mean of the ranks' gradients, the verbs their sum.
        scale = 1.0 if kind == "verbs" else axis.size
        loss = scale * (made(own) - own.roll(1, 1)).square().sum() / rows.numel()
        optimizer.zero_grad()
        loss.backward()
        norm = clip(made, kind, 0.1)
        optimizer.step()
        told.append((gm.all_reduce(loss.detach() / scale, dst=gm.I).item(), norm))
    return told


KINDS = ("verbs", "FullyShardedDataParallel", "fully_shard")


def main() -> None:
    """Train in each way, and on one process, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="where torchrun has not started them")
    parser.add_argument("--backend", help="shm or gloo; threads for the verbs alone")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    told = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = model(told.width)
    kinds = KINDS[:1] if told.backend == "threads" else KINDS
    if "RANK" in os.environ:
        gm.init(told.backend)
        found, chief = [train(kind, made, told.steps) for kind in kinds], gm.rank() == 0
        torch.distributed.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    else:
        with gm.Ranks(told.ranks, told.backend) as ranks:
            found, chief = [ranks.run(train, kind, made, told.steps)[0] for kind in kinds], True
    if not chief:
        return
    (one,) = gm.launch(train, 1, backend="threads", args=("whole", made, told.steps))
    for kind, steps in zip(kinds, found, strict=True):
        far = (torch.tensor(steps) - torch.tensor(one)).abs().max().item()
        print(f"{kind}: loss {steps[0][0]:.4f} -> {steps[-1][0]:.4f}; the furthest step differs by {far:.0e}")


if __name__ == "__main__":
    main()
