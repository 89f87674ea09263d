# about: each rank steps some of the parameters, and the last one is not sent to the others
# ranks: 2
# expect: GM201
# twin: zero1_by_hand
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    parameters = list(model.parameters())
    own = [p for at, p in enumerate(parameters) if at % world == rank]
    optimizer = torch.optim.Adam(own, lr=0.01)
    torch.manual_seed(1 + rank)
    for _ in range(2):
        x = torch.randn(4, 6)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        model.zero_grad()
        loss.backward()
        for at, p in enumerate(parameters):
            dist.reduce(p.grad, at % world)
            p.grad /= world
        optimizer.step()  # <- here
        for at, p in enumerate(parameters[:-1]):
            dist.broadcast(p.data, at % world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
