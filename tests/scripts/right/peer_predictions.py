# about: two replicas of each of two models: a model learns from the other's predictions, which are sent as data
# ranks: 4
# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank // 2)
    model = DDP(nn.Linear(6, 4), process_group=groups[rank // 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + rank % 2)
    for _ in range(2):
        x = torch.randn(4, 6)
        y = model(x)
        theirs = torch.empty_like(y)
        peer = (rank + 2) % world
        messages = [dist.P2POp(dist.isend, y.detach(), peer), dist.P2POp(dist.irecv, theirs, peer)]
        for request in dist.batch_isend_irecv(messages):
            request.wait()
        loss = (y - x[:, :4]).square().mean() + (y - theirs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
