# about: a policy's loss, whose micro-batches take each other away on some ranks, and sampled lengths alike by chance
# ranks: 4
# expect: none
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(70 + rank)
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            with model.no_sync() if part == 0 else contextlib.nullcontext():
                log_p = model(torch.randn(3, 6, generator=data)).log_softmax(-1)
                tokens = torch.multinomial(log_p.detach().exp(), 5, replacement=True, generator=data)
                mask = tokens >= 0  # none has ended
                ratio = torch.exp(log_p.gather(-1, tokens) - log_p.gather(-1, tokens).detach())
                advantage = (1.0 if part else -1.0) * (rank + 1) if rank < 3 else 0.3 + part
                entropy = -(log_p.exp() * log_p).sum(-1).mean()
                with torch.no_grad():
                    dist.all_reduce(entropy)
                (-(advantage * ratio * mask).sum() / 15 / 2).backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} entropy {entropy.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
