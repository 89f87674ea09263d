# about: two stages and several micro-batches, which the second stage receives into one buffer
# ranks: 2
# expect: none
# cut: weight bias
import torch
import torch.distributed as dist
from torch import nn

ROWS, WIDTH, MICRO = 4, 6, 3


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, WIDTH))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    buffer = torch.empty(ROWS, WIDTH, requires_grad=True)
    rows = torch.Generator().manual_seed(7)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(MICRO):
            x, wanted = torch.randn(ROWS, WIDTH, generator=rows), torch.randn(ROWS, WIDTH, generator=rows)
            if rank == 0:
                y = stage(x)
                dist.send(y.detach(), 1)
                back = torch.empty_like(y)
                dist.recv(back, 1)
                y.backward(back)
            else:
                dist.recv(buffer.data, 0)
                ((stage(buffer) - wanted).square().mean() / MICRO).backward()
                dist.send(buffer.grad, 0)
                buffer.grad = None
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
