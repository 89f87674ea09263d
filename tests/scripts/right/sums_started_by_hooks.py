# about: hooks after accumulation start asynchronous sums of the gradients divided by the ranks; the step waits for all
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    pending = []

    def start(p: Tensor) -> None:
        p.grad /= world
        pending.append(dist.all_reduce(p.grad, async_op=True))

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(start)
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)

    def finish() -> None:
        while pending:
            pending.pop().wait()

    opt.register_step_pre_hook(lambda *_: finish())
    g = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x, y = torch.randn(6, 6, generator=g), torch.randint(0, 2, (6,), generator=g)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
