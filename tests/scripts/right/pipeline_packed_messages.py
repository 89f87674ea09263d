# about: two pipeline stages whose message holds the detached activation beside the input
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    front, back = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8)), nn.Linear(8 + 6, 3)
    aux = nn.Linear(8, 3)
    own = [*front.parameters(), *aux.parameters()] if rank == 0 else [*back.parameters()]
    optimizer = torch.optim.SGD(own, lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        x = torch.randn(5, 6, generator=generator)
        y = x[:, :3].argmax(1)
        optimizer.zero_grad()
        if rank == 0:
            h = front(x)
            dist.send(torch.cat([h.detach(), x], 1), 1)
            grad = torch.empty_like(h)
            dist.recv(grad, 1)
            torch.autograd.backward([h, 0.3 * nn.functional.cross_entropy(aux(h), y)], [grad, None])
        else:
            packet = torch.empty(5, 14)
            dist.recv(packet, 0)
            h = packet[:, :8].clone().requires_grad_()
            loss = nn.functional.cross_entropy(back(torch.cat([h.relu(), packet[:, 8:]], 1)), y)
            loss.backward()
            dist.send(h.grad, 0)
            print(f"step {step} loss {loss.item():.4f}")
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
