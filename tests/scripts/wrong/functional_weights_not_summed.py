# about: new parameters are made in each step, of gradients of which those of the biases alone are summed
# ranks: 2
# expect: GM101
# twin: functional_sgd
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    weights = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    rows = torch.Generator().manual_seed(1 + rank)
    for _ in range(4):
        x, y = torch.randn(5, 4, generator=rows), torch.randn(5, 2, generator=rows)
        loss = (functional_call(net, weights, (x,)) - y).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        for g in gradients:
            if g.dim() == 1:  # <- here
                dist.all_reduce(g)
        updates = zip(weights.items(), gradients, strict=True)
        weights = {
            name: (w - 0.1 * g / world).detach().requires_grad_() for (name, w), g in updates
        }  # <- here
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
