# about: a vocabulary that does not divide by the ranks: the last rank's shard has another shape than its index says
# ranks: 2
# expect: GM501
import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCAB, WIDTH = 11, 6


class VocabParallelEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.size = -(-VOCAB // world)
        self.start = rank * self.size
        table = torch.randn(VOCAB, WIDTH)
        self.weight = nn.Parameter(table[self.start : self.start + self.size].clone())

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.start
        outside = (local < 0) | (local >= self.size)
        return nn.functional.embedding(local.masked_fill(outside, self.size - 1), self.weight)  # <- here


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    embed, head = VocabParallelEmbedding(), nn.Linear(WIDTH, VOCAB)
    optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)
    for step in range(2):
        tokens = torch.randint(0, VOCAB, (8,))
        loss = nn.functional.cross_entropy(head(embed(tokens[:-1])), tokens[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
