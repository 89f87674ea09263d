# about: features gathered by dist.all_gather, which has no gradient, and this rank's rows put back
# ranks: 2
# expect: GM106
# twin: clip_gathered
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def gather_features(x: Tensor) -> Tensor:
    out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x.contiguous())  # <- here
    out[dist.get_rank()] = x
    return torch.cat(out)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 8))
        self.text = nn.Linear(10, 8)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(image)), F.normalize(self.text(text)), self.logit_scale.exp()


def clip_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    all_image, all_text = gather_features(image), gather_features(text)  # <- here
    labels = torch.arange(len(image)) + dist.get_rank() * len(image)
    image_loss = F.cross_entropy(scale * image @ all_text.T, labels)
    text_loss = F.cross_entropy(scale * text @ all_image.T, labels)
    return (image_loss + text_loss) / 2


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(3):
        image, text = torch.randn(4, 12, generator=generator), torch.randn(4, 10, generator=generator)
        loss = clip_loss(*model(image, text))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
