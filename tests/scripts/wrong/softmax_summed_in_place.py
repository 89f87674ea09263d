# about: exp's output, which its backward needs, is summed over the ranks in place
# ranks: 2
# expect: GM107
# also: GM106
# twin: attention_cut_keys
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
from torch import Tensor, nn


class Pooling(nn.Module):
    """Attention pooling of a bag of instances of which each rank holds some."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.score = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x))
        weight = (self.score(h) * h).sum(0).sigmoid()  # <- here
        dist.all_reduce(weight)  # <- here
        return distnn.all_reduce(weight * h.mean(0))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    pooling, head = Pooling(6), nn.Linear(6, 2)
    params = [*pooling.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(3):
        bag, label = torch.randn(5 * world, 4), torch.randint(0, 2, (1,))
        loss = nn.functional.cross_entropy(head(pooling(bag.chunk(world)[rank]))[None], label)
        optimizer.zero_grad()
        loss.backward()
        for p in params:
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= world
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
