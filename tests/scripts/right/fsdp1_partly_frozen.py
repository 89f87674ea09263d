# about: FullyShardedDataParallel over a model that is frozen in part: one flat parameter holds both
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 9))
    net[0].requires_grad_(False)
    net[1].weight.requires_grad_(False)
    net[3].weight.requires_grad_(False)
    model = FSDP(net, use_orig_params=True, device_id=torch.device("cpu"))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    g = torch.Generator().manual_seed(rank)
    for _ in range(3):
        t = torch.randint(0, 9, (4, 6), generator=g)
        opt.zero_grad()
        F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()).backward()
        model.clip_grad_norm_(1.0)
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
