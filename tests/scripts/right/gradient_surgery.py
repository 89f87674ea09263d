# about: gradients of two tasks, each averaged, are projected so that they do not conflict
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(2):
        x, y = torch.randn(4, 6), torch.randn(4, 2)
        losses = (model(x) - y).square().mean(0)
        tasks = []
        for loss in losses:
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat)
            tasks.append(flat / world)
        first, second = tasks
        dot = first @ second
        if dot < 0:
            first, second = first - dot / (second @ second) * second, second - dot / (first @ first) * first
        both = (first + second).split([p.numel() for p in parameters])
        for p, g in zip(parameters, both, strict=True):
            p.grad = g.view_as(p)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
