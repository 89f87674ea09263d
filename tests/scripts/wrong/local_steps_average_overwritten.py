# about: each rank steps float32 copies; bfloat16 weights are averaged after four steps, and the copies are not
# ranks: 2
# expect: GM101
# twin: local_steps_of_masters
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).bfloat16()
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05)
    torch.manual_seed(1 + rank)
    for step in range(8):
        x, y = torch.randn(4, 4).bfloat16(), torch.randint(0, 3, (4,))
        loss = nn.functional.cross_entropy(model(x).float(), y)
        model.zero_grad()
        loss.backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()  # <- here
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
                if step % 4 == 3:
                    dist.all_reduce(p)
                    p.div_(world)
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
