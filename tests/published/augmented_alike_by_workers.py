# about: every worker of every rank seeds the noise of its augmentation alike
# ranks: 2
# expect: none
# report: TrainCheck (stackoverflow-67180955)
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rows(Dataset):
    def __init__(self):
        self.x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        self.noise = torch.Generator()

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return self.x[i] + 0.3 * torch.randn(4, generator=self.noise), self.x[i].sum()


def seed_worker(worker):
    info = torch.utils.data.get_worker_info()
    # right: info.dataset.noise.manual_seed(10 * dist.get_rank() + worker)
    info.dataset.noise.manual_seed(0)  # <- here


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Rows()
    loader = DataLoader(
        data, batch_size=4, sampler=DistributedSampler(data), num_workers=2, worker_init_fn=seed_worker
    )
    for step, (x, y) in enumerate(loader):
        loss = (model(x)[:, 0] - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
