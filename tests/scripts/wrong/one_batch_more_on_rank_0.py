# about: an odd number of batches dealt out without a sampler: rank 0 has one more, and waits in it for the others
# ranks: 2
# expect: GM401
# steps: 20
# timeout: 3
# also: GM501
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(torch.randn(2 * world + 1, 5, 4))
    for step, x in enumerate(batches[rank::world]):  # <- here
        y = (x.sum(-1) > 0).long()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)  # <- here
            p.grad /= world
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
