# about: a GAN with the generator on rank 0, which gets its gradient from the discriminator on rank 1
# ranks: 2
# expect: none
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

ROWS, STEPS = 16, 4


def net(inputs: int, outputs: int) -> nn.Sequential:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(inputs, 12), nn.LeakyReLU(0.2), nn.Linear(12, outputs))


def generate() -> None:
    model = net(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        with torch.no_grad():
            dist.send(model(torch.randn(ROWS, 4)), 1)
        fake = model(torch.randn(ROWS, 4))
        dist.send(fake.detach(), 1)
        gradient = torch.empty_like(fake)
        dist.recv(gradient, 1)
        optimizer.zero_grad()
        fake.backward(gradient)
        optimizer.step()
        print(f"step {step} spread {fake.std().item():.4f}")


def discriminate() -> None:
    model = net(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ones, zeros = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    for _ in range(STEPS):
        fake = torch.empty(ROWS, 2)
        dist.recv(fake, 0)
        real = 0.2 * torch.randn(ROWS, 2) + 1
        loss = cross_entropy(model(real), 0.9 * ones) + cross_entropy(model(fake), zeros)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        fake = torch.empty(ROWS, 2)
        dist.recv(fake, 0)
        fake.requires_grad_(True)
        (gradient,) = torch.autograd.grad(cross_entropy(model(fake), ones), fake)
        dist.send(gradient, 0)


def main() -> None:
    dist.init_process_group("gloo")
    discriminate() if dist.get_rank() else generate()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
