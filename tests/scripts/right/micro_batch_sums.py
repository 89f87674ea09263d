# about: micro-batches of different numbers of tokens: sums, divided by the step's number on all ranks
# ranks: 2
# expect: none
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
        batches = []
        for micro in range(2):
            tokens = torch.randint(0, 9, (4, 7), generator=generator)
            labels = tokens.roll(-1, 1)
            labels[:, 5 - rank - 2 * micro :] = -100
            batches.append((tokens, labels))
        count = torch.stack([(labels != -100).sum() for _, labels in batches]).sum()
        dist.all_reduce(count)
        for tokens, labels in batches:
            logits = model(tokens).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
            (loss * dist.get_world_size() / count).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
