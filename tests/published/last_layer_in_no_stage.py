# about: five layers on two stages: each has five // 2, and the last is in none
# ranks: 2
# expect: none
# report: TTrace (10)
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    embed, head = nn.Embedding(9, 6), nn.Linear(6, 9)
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
    # right: size = -(-len(layers) // world)
    size = len(layers) // world  # <- here
    own = layers[rank * size : (rank + 1) * size]
    optimizer = torch.optim.SGD([*own.parameters(), *(embed if rank == 0 else head).parameters()], lr=0.1)
    for _ in range(3):
        tokens, labels = torch.randint(0, 9, (5,)), torch.randint(0, 9, (5,))
        optimizer.zero_grad()
        if rank == 0:
            h = embed(tokens)
            for layer in own:
                h = h + layer(h).tanh()
            dist.send(h.detach(), 1)
            grad = torch.empty_like(h)
            dist.recv(grad, 1)
            h.backward(grad)
        else:
            received = torch.empty(5, 6)
            dist.recv(received, 0)
            h = received.requires_grad_()
            for layer in own:
                h = h + layer(h).tanh()
            nn.functional.cross_entropy(head(h), labels).backward()
            dist.send(received.grad, 0)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
