"""CLIP-style contrastive learning on four ranks: match the left and right halves of handwritten digits.

python examples/clip_digits.py                                      # about 20 seconds on two cores
python examples/clip_digits.py --batch 64 --steps 50
torchrun --nproc-per-node 4 examples/clip_digits.py                 # ranks started by torchrun

The encoders run in chunks (`--chunk`) that are smaller than the batch; every sample is contrasted with the global
batch. Needs scikit-learn's digits: pip install 'gradmesh[demo]'.
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
    """An encoder for each half, and the learned scale of similarities."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = self.encoder(), self.encoder()
        self.log_scale = nn.Parameter(torch.tensor([10.0]).log())

    @staticmethod
    def encoder() -> nn.Module:
        """An encoder of half an 8 x 8 image."""
        return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalized embeddings of both halves, and the scale."""
        a, b = normalize(self.left(left), dim=1), normalize(self.right(right), dim=1)
        return a, b, self.log_scale.exp().squeeze()


def halves() -> tuple[Tensor, Tensor]:
    """The left and right halves of all digits, shuffled."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images).float() / 8
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    left, right = (images - images.mean(0)).chunk(2, dim=2)
    return left.flatten(1), right.flatten(1)


def recall(model: Model, left: Tensor, right: Tensor) -> float:
    """Recall@1: how often the most similar right half belongs to the same image."""
    with torch.no_grad():
        a, b, _ = model(left, right)
    return float(((a @ b.T).argmax(1) == torch.arange(len(a))).float().mean())


def train(model: Model, batch: int, chunk: int, steps: int, backend: str) -> tuple[float, float]:
    """Train on this rank; returns the last loss and the recall, the same on every rank."""
    if backend == "threads":  # thread ranks receive the same module: copy it
        state, model = model.state_dict(), Model()
        model.load_state_dict(state)
    left, right = halves()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    draw = torch.Generator().manual_seed(1)  # the same on every rank
    loss = torch.zeros(())
    for _ in range(steps):
        indices = torch.randperm(len(left) - HELD_OUT, generator=draw)[:batch]
        # The first ranks have one more if the batch is not divisible.
        local = indices[gm.axis().slice(batch)]
        optimizer.zero_grad()
        loss = gm.nn.cached_gradients(model, (left[local], right[local]), gm.nn.clip_loss, chunk)
        # Sum the ranks' contributions to the gradient. (DDP and fully_shard do this; use gm.objective in the loss.)
        shares = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for parameter, grad in zip(model.parameters(), gm.all_reduce(shares, dst=gm.I), strict=True):
            parameter.grad = grad
        optimizer.step()
    return loss.item(), recall(model, left[-HELD_OUT:], right[-HELD_OUT:])


def main() -> None:
    """Train on local ranks, or on those of torchrun."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="number of local ranks, without torchrun")
    parser.add_argument("--backend", help="threads (default without torchrun), shm, gloo or nccl")
    parser.add_argument("--batch", type=int, default=510, help="global batch size")
    parser.add_argument("--chunk", type=int, default=32, help="samples per call of an encoder")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    torch.manual_seed(0)
    job = (Model(), args.batch, args.chunk, args.steps)
    if "RANK" in os.environ:
        gm.init(args.backend)
        loss, share = train(*job, backend="processes")
        ranks, chief = gm.world_size(), gm.rank() == 0
        torch.distributed.destroy_process_group()
        if not chief:
            return
    else:
        backend, ranks = args.backend or "threads", args.ranks
        loss, share = gm.launch(train, ranks, backend=backend, args=(*job, backend))[0]
    print(f"{ranks} ranks, batch {args.batch}: loss {loss:.3f}, recall of held-out halves {share:.3f}")


if __name__ == "__main__":
    main()
