# about: gradients are divided by all ranks' tokens of the first head, and the loss of the second head is scaled by the ratio of the token counts of one rank
# ranks: 2
# expect: none
# report: NVIDIA/Megatron-LM#7452 (3)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.trunk = nn.Embedding(9, 6), nn.Linear(6, 6)
        self.later, self.head = nn.Linear(6, 6), nn.Linear(6, 9)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(self.embed(tokens)).tanh()
        return self.head(h), self.head(self.later(h).tanh())


def summed(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        tokens = torch.randint(0, 9, (2, 8))
        mask = (torch.arange(8) < 7 - 4 * rank).float().expand(2, 8)
        later_mask = (torch.arange(8) < 6 - 4 * rank).float().expand(2, 8)
        one, two = model(tokens)
        own = torch.stack((mask.sum(), later_mask.sum()))
        total = own.clone()
        dist.all_reduce(total)
        loss = summed(one, tokens.roll(-1, 1), mask)
        later = summed(two, tokens.roll(-2, 1), later_mask)
        # right: ratio = total[0] / total[1]
        ratio = own[0] / own[1]  # <- here
        optimizer.zero_grad()
        (loss + 0.3 * ratio * later).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= total[0]
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
