# about: ZeRO: each rank steps its part of a flat buffer, which is gathered into one that the parameters are no views of
# ranks: 2
# expect: GM103
# report: TTrace (9)
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.data = part.view_as(p)
    own = nn.Parameter(flat.chunk(world)[rank].clone())
    optimizer = torch.optim.SGD([own], lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        x, y = torch.randn(6, 4), torch.randn(6, 2)
        loss = (model(x) - y).square().mean()
        model.zero_grad()
        loss.backward()
        grad = torch.cat([p.grad.flatten() for p in parameters]) / world
        dist.all_reduce(grad)
        own.grad = grad.chunk(world)[rank]
        optimizer.step()
        # right: dist.all_gather_into_tensor(flat, own.detach())
        dist.all_gather_into_tensor(torch.empty_like(flat), own.detach())  # <- here
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
