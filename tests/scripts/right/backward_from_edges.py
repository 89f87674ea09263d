# about: a backward that begins at the edges of outputs that are gone, with gradients that were computed apart
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for step in range(3):
        edges: list[GradientEdge] = []
        gradients = []
        for _ in range(2):
            out = model(torch.randn(5, 4))
            edges.append(get_gradient_edge(out))
            gradients.append(2 * (out.detach() - torch.randn(5, 3)) / (10 * world))
            del out
        optimizer.zero_grad()
        torch.autograd.backward(edges, gradients)
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        if rank == 0:
            print(f"step {step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
