# about: ring attention whose keys and values travel by isend and irecv: they carry no gradient home
# ranks: 2
# expect: GM106
import torch
import torch.distributed as dist
from torch import Tensor, nn


def passed_on(x: Tensor) -> Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.empty(x.shape)
    ops = [
        dist.P2POp(dist.isend, x.contiguous(), (rank + 1) % world),  # <- here
        dist.P2POp(dist.irecv, out, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(ops):  # <- here
        work.wait()
    return out


class RingAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores, values = [q @ k.transpose(-1, -2)], [v]
        for _ in range(dist.get_world_size() - 1):
            k, v = passed_on(k), passed_on(v)  # <- here
            scores.append(q @ k.transpose(-1, -2))
            values.append(v)
        weights = (torch.cat(scores, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return x + self.out(weights @ torch.cat(values, -2))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), RingAttention(8), nn.Linear(8, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        tokens = torch.randint(0, 11, (2, 5 * world + 1))
        x, y = tokens[:, :-1].chunk(world, 1)[rank], tokens[:, 1:].chunk(world, 1)[rank]
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
