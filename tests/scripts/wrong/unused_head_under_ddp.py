# about: a head that no loss reaches: DDP refuses the second forward
# ranks: 2
# expect: GM501
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.boxes, self.classes = nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor, boxes: bool) -> Tensor:
        h = self.backbone(x)
        return self.boxes(h) if boxes else self.classes(h)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(2):
        x = torch.randn(4, 5, generator=generator)
        out = model(x, boxes=False)  # <- here
        loss = nn.functional.cross_entropy(out, torch.randint(0, 3, (4,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
