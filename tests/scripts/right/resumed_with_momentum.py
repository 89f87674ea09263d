# about: a run that is resumed: every rank loads the parameters and the optimizer's momentum
# ranks: 2
# expect: none
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(saved: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    model = DDP(net)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}


def main() -> None:
    dist.init_process_group("gloo")
    file = io.BytesIO()
    torch.save(train(None, 3), file)
    file.seek(0)
    train(torch.load(file), 3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
