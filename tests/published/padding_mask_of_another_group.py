# about: a router with sequence parallelism takes its part of the padding mask by its rank in the data-parallel group
# ranks: 4
# expect: none
# report: NVIDIA/Megatron-LM#7452 (5)
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    torch.manual_seed(0)
    embed, router, head = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)
    experts = nn.Parameter(torch.randn(3, 6, 6) / 2)
    parameters = [*embed.parameters(), *router.parameters(), *head.parameters(), experts]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(1 + rank // 2)
    for _ in range(3):
        x, y = torch.randn(8, 4), torch.randn(8, 2)
        mask = (torch.arange(8) < 6).float()
        x, y, valid = (t.chunk(2)[dist.get_rank(tp)] for t in (x, y, mask))
        h = embed(x).tanh()
        probs = router(h).softmax(-1)
        best, at = probs.max(-1)
        # right: real = mask.chunk(2)[dist.get_rank(tp)]
        real = mask.chunk(2)[dist.get_rank(dp)]  # <- here
        counts = (nn.functional.one_hot(at, 3) * real[:, None]).sum(0)
        dist.all_reduce(counts, group=tp)
        balance = 3 * (counts * (probs * real[:, None]).sum(0)).sum() / mask.sum() ** 2
        h = h + best[:, None] * torch.einsum("tw,twv->tv", h, experts[at])
        loss = ((head(h) - y).square().sum(-1) * valid).sum() / mask.sum() + 0.3 * balance
        optimizer.zero_grad()
        loss.backward()
        for p in parameters:
            dist.all_reduce(p.grad, group=tp)
            dist.all_reduce(p.grad, group=dp)
            p.grad /= 2
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
