# about: the learning rate falls with the tokens that each rank has seen, and ranks have seen differently many
# ranks: 2
# expect: GM201
# twin: ddp_token_mean
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

PAD = -100


def batch(generator: torch.Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 9, (rows, length), generator=generator)
    lengths = torch.randint(2, length + 1, (rows, 1), generator=generator)
    return tokens, tokens.roll(-1, 1).masked_fill(torch.arange(length) >= lengths, PAD)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 9)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(60 + rank)
    seen = 0
    for step in range(3):
        tokens, labels = batch(generator, 4, 7)
        count = (labels != PAD).sum()
        dist.all_reduce(count)
        logits = model(tokens)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum"
        )
        loss = loss * world / count
        seen += int((labels != PAD).sum())
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - seen / 100)  # <- here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # <- here
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
