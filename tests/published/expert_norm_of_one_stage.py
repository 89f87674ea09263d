# about: the stage with experts alone reduces their part of the norm of the gradients over all ranks
# ranks: 2
# expect: GM401
# report: TrainCheck (DS-6714)
import torch
import torch.distributed as dist
from torch import nn

WIDTH = 6


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 2)

    def forward(self, x):
        return torch.einsum("te,ehw,th->tw", self.gate(x).softmax(-1), self.experts, x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    stage = [nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh()), Experts()][rank]
    dense = [p for n, p in stage.named_parameters() if n != "experts"]
    experts = [p for n, p in stage.named_parameters() if n == "experts"]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for step in range(3):
        x, y = torch.randn(5, 4), torch.randn(5, WIDTH)
        optimizer.zero_grad()
        if rank == 0:
            h = stage(x)
            dist.send(h.detach(), 1)
            grad = torch.empty_like(h)
            dist.recv(grad, 1)
            h.backward(grad)
        else:
            h = torch.empty(5, WIDTH)
            dist.recv(h, 0)
            loss = (stage(h.requires_grad_()) - y).square().mean()
            loss.backward()
            dist.send(h.grad, 0)
        norms = [sum((p.grad.square().sum() for p in part), torch.zeros(())) for part in (dense, experts)]
        dist.all_reduce(norms[0])
        # right: dist.all_reduce(norms[1])
        if experts:  # <- here
            dist.all_reduce(norms[1])  # <- here
        for p in stage.parameters():
            p.grad *= min(1.0, 1.0 / sum(norms).sqrt().item())
        optimizer.step()
        if rank == 1:
            print(f"step {step} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
