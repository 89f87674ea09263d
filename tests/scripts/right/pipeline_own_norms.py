# about: two pipeline stages by send and recv, each with a norm of its own: both begin as ones, and are two parameters
# ranks: 2
# expect: none
# cut: layer.weight layer.bias norm.weight norm.bias
import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, BATCH = 6, 8


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.layer(x)))


def train_step(stage: Stage, x: Tensor, y: Tensor) -> float:
    if dist.get_rank() == 0:
        h = stage(x)
        dist.send(h.detach(), dst=1)
        grad = torch.empty_like(h)
        dist.recv(grad, src=1)
        h.backward(grad)
        return 0.0
    h = torch.empty(BATCH, WIDTH)
    dist.recv(h, src=0)
    h.requires_grad_()
    loss = (stage(h) - y).square().mean()
    loss.backward()
    dist.send(h.grad, dst=0)
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(40 + dist.get_rank())
    stage = Stage()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        optimizer.zero_grad()
        loss = train_step(stage, x, x.sin())
        optimizer.step()
        if dist.get_rank() == 1:
            print(f"step {step} loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
