# about: a tensor parallel tower under DDP, whose features are gathered: the sum of all ranks' copies of the loss
# ranks: 4
# expect: none
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        out = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(out, x.contiguous(), group=group)
        return torch.cat(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Tower(nn.Module):
    def __init__(self, tp: Any) -> None:
        super().__init__()
        self.tp = tp
        self.embed, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        up, down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        own = slice(6 * dist.get_rank(tp), 6 * dist.get_rank(tp) + 6)
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(up.weight[own])
            self.up.bias.copy_(up.bias[own])
            self.down.weight.copy_(down.weight[:, own])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        h = Copy.apply(self.norm(x), self.tp)
        x = x + Reduce.apply(self.down(nn.functional.gelu(self.up(h))), self.tp)
        return nn.functional.normalize(self.head(x), dim=-1)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    torch.manual_seed(0)
    model = DDP(Tower(tp), process_group=dp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(100 * step + dist.get_rank(dp) + 1)
        x = torch.randn(4, 6)
        a, b = (Gather.apply(model(each), dp) for each in (x, x + 0.1 * torch.randn(4, 6)))
        logits = a @ b.T / 0.1
        loss = nn.functional.cross_entropy(logits, torch.arange(len(a)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
