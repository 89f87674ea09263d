# about: FullyShardedDataParallel with parameters of their own shapes: a shard has one entry, others are empty
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((9,), 0.25))
        self.linear = nn.Linear(9, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.tanh(self.linear(x))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(nn.Linear(5, 9), Block(), Block(), nn.Linear(9, 1)),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        x = torch.randn(6, 5)
        loss = (model(x) - x.norm(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
