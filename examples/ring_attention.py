"""Context parallelism: a small causal language model on a sharded sequence, compared with one process.

    python examples/ring_attention.py                                  # 4 local ranks
    torchrun --nproc-per-node 4 examples/ring_attention.py             # ranks started by torchrun
    python examples/ring_attention.py --attention ulysses --ranks 3

Each sequence repeats its first eighth: a model can predict it only by attending far enough back; without, the loss is
2.77. Each rank has a shard of each sequence, in zigzag order, for equal work on all ranks. Only the attention call in
the model differs from a single-process model. The losses are those of one process.
"""

from __future__ import annotations

import argparse
import copy
import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gradmesh as gm

ORDER: gm.nn.sequence.Order = "zigzag"


@dataclass(frozen=True)
class Job:
    """Hyperparameters."""

    attention: str = "ring"
    length: int = 64
    batch: int = 4
    width: int = 32
    steps: int = 150
    seed: int = 0


class Layer(nn.Module):
    """A pre-norm transformer block with grouped queries (four query heads, two KV heads)."""

    def __init__(self, width: int, attention: str) -> None:
        super().__init__()
        self.attend = gm.nn.ring_attention if attention == "ring" else gm.nn.ulysses_attention
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """The block's output at this rank's positions, (batch, local sequence, width)."""
        z = self.norm(x)
        q = self.q(z).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.kv(z).unflatten(-1, (2, 2, -1)).unbind(2)
        y = self.attend(q, k.transpose(1, 2), v.transpose(1, 2), causal=True, order=ORDER, sizes=sizes)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        made: Tensor = x + self.mlp(self.second(x))
        return made


class Model(nn.Module):
    """Maps characters and positions to the scores of the next characters."""

    def __init__(self, job: Job, characters: int = 16) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, job.width), nn.Embedding(job.length, job.width)
        self.layers = nn.ModuleList(Layer(job.width, job.attention) for _ in range(2))
        self.head = nn.Linear(job.width, characters)

    def forward(self, tokens: Tensor, places: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """The scores at this rank's positions."""
        x = self.token(tokens) + self.place(places)
        for layer in self.layers:
            x = layer(x, sizes)
        scores: Tensor = self.head(x)
        return scores


def text(job: Job, step: int) -> Tensor:
    """Sequences that repeat their first eighth, the same on every rank: (batch, length + 1)."""
    generator = torch.Generator().manual_seed(1000 * job.seed + step)
    drawn = torch.randint(0, 16, (job.batch, job.length // 8 + 1), generator=generator)
    return drawn.repeat(1, 9)[:, : job.length + 1]


def train(job: Job, made: Model) -> list[float]:
    """Train a copy of a model on the ranks of the world, and return the loss of each step."""
    gm.init()
    model = copy.deepcopy(made)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sizes = gm.nn.sequence.sizes(job.length, order=ORDER)
    places = gm.nn.sequence.positions(job.length, order=ORDER)
    losses = []
    for step in range(job.steps):
        tokens = text(job, step)
        inputs, following = tokens[:, places], tokens[:, places + 1]
        scores = model(inputs, places, sizes)
        each = nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="sum")
        # The mean over the tokens of all ranks; gradients are summed below.
        loss = gm.objective(each, weights=following.numel(), local="sum")
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = gm.all_reduce(parameter.grad, dst=gm.R)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train on several ranks and on one, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", choices=["ring", "ulysses"], default="ring")
    parser.add_argument("--ranks", type=int, default=4, help="number of local ranks, without torchrun")
    parser.add_argument(
        "--backend", help="threads (default without torchrun), shm (default with torchrun) or gloo"
    )
    parser.add_argument("--length", type=int, default=Job.length)
    parser.add_argument("--steps", type=int, default=Job.steps)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = Job(args.attention, args.length, steps=args.steps)
    torch.manual_seed(job.seed)
    model = Model(job).double()
    if "RANK" in os.environ:
        gm.init(args.backend)
        several, chief = train(job, model), gm.rank() == 0
        torch.distributed.destroy_process_group()
    else:
        several, chief = (
            gm.launch(train, args.ranks, backend=args.backend or "threads", args=(job, model))[0],
            True,
        )
    if not chief:
        return
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    (single,) = gm.launch(train, 1, backend="threads", args=(job, model))
    for step in range(0, job.steps, max(1, job.steps // 6)):
        print(f"step {step:3}  {several[step]:.6f} on the ranks  {single[step]:.6f} on one process")
    far = max(abs(a - b) for a, b in zip(several, single, strict=True))
    print(f"loss {several[0]:.3f} -> {several[-1]:.3f}; the furthest step differs by {far:.0e}")


if __name__ == "__main__":
    main()
