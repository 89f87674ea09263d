"""Two encoders learn to find the right half of a handwritten digit by the left one, on four ranks.

python examples/clip_digits.py                                      # some 20 seconds on two cores
python examples/clip_digits.py --batch 64 --steps 50
torchrun --nproc-per-node 4 examples/clip_digits.py                 # ranks that torchrun starts

The batch is larger than an encoder is ever given at once (`--chunk`), and all of it are negatives of each sample. The
digits are scikit-learn's: pip install 'gradmesh[demo]'.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import gradmesh as gm

HELD_OUT = 297


class Model(nn.Module):
    """An encoder for each half, and the scale of similarities, returned so that it is trained with them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = self.encoder(), self.encoder()
        self.log_scale = nn.Parameter(torch.tensor([10.0]).log())

    @staticmethod
    def encoder() -> nn.Module:
        """Of half an image of 8 x 8."""
        return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unit vectors of both halves, and the scale."""
        a, b = normalize(self.left(left), dim=1), normalize(self.right(right), dim=1)
        return a, b, self.log_scale.exp().squeeze()


def halves() -> tuple[Tensor, Tensor]:
    """The left and the right half of every digit, in an order of its own."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images).float() / 8
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    left, right = (images - images.mean(0)).chunk(2, dim=2)
    return left.flatten(1), right.flatten(1)


def recall(model: Model, left: Tensor, right: Tensor) -> float:
    """How often the most similar right half is the own one."""
    with torch.no_grad():
        a, b, _ = model(left, right)
    return float(((a @ b.T).argmax(1) == torch.arange(len(a))).float().mean())


def train(model: Model, batch: int, chunk: int, steps: int, backend: str) -> tuple[float, float]:
    """Train on this rank; returns the last loss and the recall, which are the same on every rank."""
    if backend == "threads":  # whose ranks are all handed the same module
        state, model = model.state_dict(), Model()
        model.load_state_dict(state)
    left, right = halves()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    draw = torch.Generator().manual_seed(1)  # the same on every rank
    loss = torch.zeros(())
    for _ in range(steps):
        everyone = torch.randperm(len(left) - HELD_OUT, generator=draw)[:batch]
        # The first ranks have one more, where the batch is not divisible.
        mine = everyone[gm.axis().slice(batch)]
        optimizer.zero_grad()
        loss = gm.nn.cached_gradients(model, (left[mine], right[mine]), gm.nn.clip_loss, chunk)
        # Each rank has a share of the gradient. In DDP or fully_shard this is theirs, with gm.objective in the loss.
        shares = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for parameter, grad in zip(model.parameters(), gm.all_reduce(shares, dst=gm.I), strict=True):
            parameter.grad = grad
        optimizer.step()
    return loss.item(), recall(model, left[-HELD_OUT:], right[-HELD_OUT:])


def main() -> None:
    """Train on ranks of this machine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="where torchrun has not started them")
    parser.add_argument("--backend", help="threads, which is the default here, shm, gloo or nccl")
    parser.add_argument("--batch", type=int, default=510, help="samples on all ranks together")
    parser.add_argument("--chunk", type=int, default=32, help="samples that an encoder is given at once")
    parser.add_argument("--steps", type=int, default=150)
    told = parser.parse_args()
    torch.manual_seed(0)
    job = (Model(), told.batch, told.chunk, told.steps)
    if "RANK" in os.environ:
        gm.init(told.backend)
        loss, share = train(*job, backend="processes")
        ranks, chief = gm.world_size(), gm.rank() == 0
        torch.distributed.destroy_process_group()
        if not chief:
            return
    else:
        backend, ranks = told.backend or "threads", told.ranks
        loss, share = gm.launch(train, ranks, backend=backend, args=(*job, backend))[0]
    print(f"{ranks} ranks, batch {told.batch}: loss {loss:.3f}, recall of held-out halves {share:.3f}")


if __name__ == "__main__":
    main()
