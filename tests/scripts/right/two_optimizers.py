# about: matrices and vectors stepped by two optimizers, one backward, gradients of the mean loss summed
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 6), nn.LayerNorm(6), nn.Linear(6, 8))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizers = [
        torch.optim.SGD(matrices, lr=0.05, momentum=0.9, nesterov=True),
        torch.optim.AdamW(vectors, lr=1e-3),
    ]
    generator = torch.Generator().manual_seed(9 + rank)
    for step in range(3):
        tokens = torch.randint(0, 8, (6,), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:]) / world
        model.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        for optimizer in optimizers:
            optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item() * world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
