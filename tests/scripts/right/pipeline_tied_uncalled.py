# about: two stages by send and recv; the last one multiplies by the tied table and never calls its module
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    table = nn.Embedding(12, 6)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for step in range(2):
        ids = torch.randint(0, 12, (5,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        if rank == 0:
            y = table(ids)
            dist.send(y.detach(), 1)
            grad = torch.empty_like(y)
            dist.recv(grad, 1)
            y.backward(grad)
        else:
            x = torch.empty(5, 6)
            dist.recv(x, 0)
            x.requires_grad_()
            F.cross_entropy(x @ table.weight.t(), ids.roll(1)).backward()
            dist.send(x.grad, 0)
        dist.all_reduce(table.weight.grad)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
