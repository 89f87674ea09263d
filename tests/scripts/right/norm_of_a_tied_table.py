# about: gradients are clipped by a norm in which a table that two stages share counts once
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(9, 6) / 2)
    layer = nn.Linear(6, 6)
    parameters = [table, *layer.parameters()] if rank == 0 else [table]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(3):
        tokens, labels = torch.randint(0, 9, (4,)), torch.randint(0, 9, (4,))
        optimizer.zero_grad()
        if rank == 0:
            h = layer(table[tokens]).tanh()
            dist.send(h.detach(), 1)
            grad = torch.empty_like(h)
            dist.recv(grad, 1)
            h.backward(grad)
        else:
            h = torch.empty(4, 6)
            dist.recv(h, 0)
            h.requires_grad_()
            nn.functional.cross_entropy(h @ table.T, labels).backward()
            dist.send(h.grad, 0)
        dist.all_reduce(table.grad)
        norm = sum(p.grad.square().sum() for p in parameters[rank:])
        norm = torch.as_tensor(norm, dtype=torch.float32)
        dist.all_reduce(norm)
        for p in parameters:
            p.grad *= min(1.0, 0.1 / float(norm.sqrt()))
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
