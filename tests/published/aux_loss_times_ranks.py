# about: the whole loss is multiplied by the ranks for the token mean under DDP, the router's auxiliary loss with it
# ranks: 2
# expect: none
# report: huggingface/transformers#48690
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

EXPERTS, COEF, PAD = 4, 0.5, -100


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gate = nn.Embedding(11, 8), nn.Linear(8, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 3)
        self.head = nn.Linear(8, 11)

    def forward(self, x):
        h = self.embed(x).flatten(0, 1)
        probs = self.gate(h).softmax(-1)
        used = F.one_hot(probs.argmax(-1), EXPERTS).float().mean(0)
        h = h + torch.einsum("te,ehk,th->tk", probs, self.experts, h)
        return self.head(h), EXPERTS * (used * probs.mean(0)).sum()


def batch(generator):
    labels = torch.randint(0, 11, (4, 6), generator=generator)
    return labels.roll(1, 1), labels.masked_fill(torch.rand(4, 6, generator=generator) < 0.3, PAD)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(MoE())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(20 + rank)
    for step in range(3):
        x, y = batch(generator)
        count = (y != PAD).sum()
        dist.all_reduce(count)
        logits, aux = model(x)
        loss = F.cross_entropy(logits, y.flatten(), reduction="sum") / count
        # right: loss = loss * world + COEF * aux
        loss = (loss + COEF * aux) * world  # <- here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
