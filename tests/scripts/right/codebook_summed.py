# about: a vector quantiser whose codebook moves by the assignments of all ranks
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


class VectorQuantizer(nn.Module):
    def __init__(self, codes: int, width: int, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("codebook", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))

    @torch.no_grad()
    def update(self, z: Tensor, index: Tensor) -> None:
        one_hot = nn.functional.one_hot(index, len(self.codebook)).to(z.dtype)
        counts, sums = one_hot.sum(0), one_hot.T @ z
        dist.all_reduce(counts)
        dist.all_reduce(sums)
        self.counts.lerp_(counts, 1 - self.decay)
        means = sums / counts.clamp(min=1)[:, None]
        used = (counts > 0)[:, None]
        self.codebook.copy_(torch.where(used, self.codebook.lerp(means, 1 - self.decay), self.codebook))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.cdist(z, self.codebook).argmin(-1)
        quantized = self.codebook[index]
        if self.training:
            self.update(z, index)
        return z + (quantized - z).detach(), (z - quantized.detach()).square().mean()


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 3), nn.Linear(3, 6)
        self.quantizer = VectorQuantizer(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        z, commitment = self.quantizer(self.encoder(x))
        return (self.decoder(z) - x).square().mean() + 0.25 * commitment


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(AutoEncoder(), broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(15 + rank)
    for step in range(3):
        loss = model(torch.randn(8, 6, generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
