# about: an embedding with sparse gradients under DistributedDataParallel, and ZeroRedundancyOptimizer for the rest
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    bags, head = DDP(nn.EmbeddingBag(20, 4, sparse=True)), DDP(nn.Linear(4, 1))
    sparse = torch.optim.SGD(bags.parameters(), lr=0.1)
    dense = ZeroRedundancyOptimizer(head.parameters(), torch.optim.Adam, lr=0.01)
    torch.manual_seed(1 + rank)
    for _ in range(2):
        loss = (head(bags(torch.randint(0, 20, (4, 3)))) - torch.randn(4, 1)).square().mean()
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
