# about: positions are added to each rank's part of an embedding before the parts are summed
# ranks: 2
# expect: GM108
# twin: vocabulary_and_positions
# cut: table
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
from torch import Tensor, nn

VOCAB, WIDTH, LENGTH = 12, 6, 5


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.start, self.size = rank * VOCAB // world, VOCAB // world
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH)[self.start : self.start + self.size].clone())
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.start
        outside = (local < 0) | (local >= self.size)
        part = self.table[local.masked_fill(outside, 0)].masked_fill(outside[..., None], 0.0)
        return distnn.all_reduce(part + self.position)  # <- here


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    embed, head = Embedding(), nn.Linear(WIDTH, VOCAB)
    replicated = [embed.position, *head.parameters()]
    optimizer = torch.optim.AdamW([embed.table, *replicated], lr=1e-2)
    for step in range(2):
        tokens = torch.randint(0, VOCAB, (2 * world, LENGTH + 1))
        logits = head(torch.relu(embed(tokens[:, :-1])))
        own = slice(2 * rank, 2 * rank + 2)
        losses = nn.functional.cross_entropy(
            logits[own].flatten(0, 1), tokens[own, 1:].flatten(), reduction="sum"
        )
        loss = losses / tokens[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        for p in replicated:
            dist.all_reduce(p.grad)
        optimizer.step()
        if rank == 0:
            print(f"step {step} part of the loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
