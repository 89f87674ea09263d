# about: the optimizer has this rank's part of one flat copy of all parameters, as a distributed optimizer's
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    part = -(-sum(sizes) // world)
    flat = torch.zeros(part * world)
    flat[: sum(sizes)] = torch.cat([p.detach().flatten() for p in parameters])
    master = nn.Parameter(flat[rank * part : (rank + 1) * part].clone())
    optimizer = torch.optim.Adam([master], lr=0.01)
    torch.manual_seed(1 + rank)
    for _ in range(2):
        x = torch.randn(4, 6)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        model.zero_grad()
        loss.backward()
        gradients = torch.zeros(part * world)
        gradients[: sum(sizes)] = torch.cat([p.grad.flatten() for p in parameters])
        own = torch.empty(part)
        dist.reduce_scatter_tensor(own, gradients)
        master.grad = own / world
        optimizer.step()
        dist.all_gather_into_tensor(flat, master.detach())
        for p, values in zip(parameters, flat[: sum(sizes)].split(sizes), strict=True):
            p.data.copy_(values.view_as(p))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
