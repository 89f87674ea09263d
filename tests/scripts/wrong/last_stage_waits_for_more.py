# about: the last stage expects one batch more than the first one sends
# ranks: 2
# expect: GM402
# steps: 20
# twin: pipeline_tied
# cut: layer.weight layer.bias norm.weight norm.bias
# timeout: 3
# also: GM401 GM501
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, BATCH, LENGTH = 13, 8, 2, 5


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.relu(self.layer(self.embed(tokens)))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)  # the output projection, tied to the first stage's
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h) @ self.embed.weight.T


def train_step(stage: nn.Module, tokens: Tensor, targets: Tensor) -> float:
    if dist.get_rank() == 0:
        h = stage(tokens)
        dist.send(h.detach(), dst=1)
        grad = torch.empty_like(h)
        dist.recv(grad, src=1)
        h.backward(grad)
        return 0.0
    h = torch.empty(BATCH, LENGTH, WIDTH)
    dist.recv(h, src=0)  # <- here
    h.requires_grad_()
    loss = F.cross_entropy(stage(h).flatten(0, 1), targets.flatten())
    loss.backward()
    dist.send(h.grad, dst=0)
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    stage = First() if rank == 0 else Last()
    dist.broadcast(stage.embed.weight.data, src=0)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for step in range(2 + rank):  # <- here
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
        optimizer.zero_grad()
        loss = train_step(stage, tokens, tokens.roll(-1, dims=1))
        dist.all_reduce(stage.embed.weight.grad)
        optimizer.step()
        if rank == 1:
            print(f"step {step} loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
