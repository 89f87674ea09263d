# about: ZeRO over replicas of two stages: the tied table's gradients are summed over the stages after each stage reduces its own to one owner
# ranks: 4
# expect: GM204
# report: TTrace (5)
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage, replica = rank // 2, rank % 2
    dp = [dist.new_group([0, 1]), dist.new_group([2, 3])][stage]
    pp = [dist.new_group([0, 2]), dist.new_group([1, 3])][replica]
    torch.manual_seed(0)
    table, layer, norm = nn.Parameter(torch.randn(9, 6) / 2), nn.Linear(6, 6), nn.LayerNorm(6)
    parameters = [table, *layer.parameters()] if stage == 0 else [norm.weight, table, norm.bias]
    own = [p for at, p in enumerate(parameters) if at % 2 == replica]
    optimizer = torch.optim.SGD(own, lr=0.1)
    torch.manual_seed(1 + replica)
    for _ in range(3):
        tokens, labels = torch.randint(0, 9, (5,)), torch.randint(0, 9, (5,))
        for p in parameters:
            p.grad = None
        if stage == 0:
            h = layer(table[tokens]).tanh()
            dist.send(h.detach(), rank + 2)
            grad = torch.empty_like(h)
            dist.recv(grad, rank + 2)
            h.backward(grad)
        else:
            h = torch.empty(5, 6)
            dist.recv(h, rank - 2)
            h.requires_grad_()
            nn.functional.cross_entropy(norm(h) @ table.T, labels).backward()
            dist.send(h.grad, rank - 2)
        # right: dist.all_reduce(table.grad, group=pp)
        for at, p in enumerate(parameters):
            p.grad /= 2
            dist.reduce(p.grad, 2 * stage + at % 2, group=dp)
        dist.all_reduce(table.grad, group=pp)  # <- here
        optimizer.step()
        for at, p in enumerate(parameters):
            dist.broadcast(p.data, 2 * stage + at % 2, group=dp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
