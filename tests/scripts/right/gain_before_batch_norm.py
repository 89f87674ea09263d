# about: gains in front of a batch norm over the ranks, whose gradient is little more than rounding
# ranks: 4
# expect: none
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, TOKENS, WIDTH, VOCABULARY = 8, 4, 8, 12


class RootNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return self.weight * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)


class GlobalBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        count = h.shape[0] * h.shape[1] * dist.get_world_size()
        moments = torch.cat([h.sum((0, 1)), h.square().sum((0, 1))])
        mean, square = (distnn.all_reduce(moments) / count).chunk(2)
        return (h - mean) * torch.rsqrt(square - mean.square() + 1e-3) * self.weight + self.bias


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gain, self.norm = RootNorm(), GlobalBatchNorm()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.norm(self.gain(self.embed(x))))
        return F.linear(h, self.embed.weight)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3010)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(11)
    for _ in range(2):
        x, y = (
            torch.randint(VOCABULARY, (ROWS, TOKENS), generator=data).chunk(world)[rank] for _ in range(2)
        )
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / (ROWS * TOKENS)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
