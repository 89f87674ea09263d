# about: of two layers that are recomputed together, the second gets the output of the first's predecessor
# ranks: 2
# expect: none
# report: TTrace (2)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def chunk(self, start: int, end: int, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers[start:end]:
            # right: h = h + layer(h).tanh()
            h = x + layer(x).tanh()  # <- here
        return h

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for start in (0, 2):
            h = checkpoint(self.chunk, start, start + 2, h, use_reentrant=False)
        return self.head(h)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        x, y = torch.randn(6, 4), torch.randn(6, 2)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= world
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
