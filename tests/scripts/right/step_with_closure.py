# about: the last of two micro-batches is in the closure of the step, as in trainers, and DDP averages there
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

PASSES = 2


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())

    def micro_batch() -> Tensor:
        x, y = torch.randn(4, 5), torch.randn(4, 1)
        loss = F.mse_loss(model(x), y) / PASSES
        loss.backward()
        return loss.detach()

    for _ in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            micro_batch()
        optimizer.step(micro_batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
