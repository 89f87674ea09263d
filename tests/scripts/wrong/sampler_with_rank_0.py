# about: a DistributedSampler with rank=0 on every rank
# ranks: 2
# expect: GM301
# twin: ddp_plain
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(24, 8, generator=generator), torch.randint(0, 3, (24,), generator=generator)
    )


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = dataset()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(  # <- here
        data,
        num_replicas=dist.get_world_size(),
        rank=0,
        shuffle=True,  # <- here
    )
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(1):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):  # <- here
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)  # <- here
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
