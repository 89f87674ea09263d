# about: two stages of torch.distributed.pipelining, two micro-batches
# ranks: 2
# expect: none
# cut: weight bias
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    part = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    rows = torch.Generator().manual_seed(3)
    for _ in range(2):
        x, y = torch.randn(4, 6, generator=rows), torch.randn(4, 6, generator=rows)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
