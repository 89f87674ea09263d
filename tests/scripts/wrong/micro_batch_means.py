# about: micro-batches have different numbers of tokens, and their means are accumulated and averaged alike
# ranks: 2
# expect: GM111
# twin: micro_batch_sums
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(60 + rank)
    for _ in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            tokens = torch.randint(0, 9, (4, 7), generator=generator)
            labels = tokens.roll(-1, 1)
            labels[:, 5 - rank - 2 * micro :] = -100
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())  # <- here
            (loss / 2).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
