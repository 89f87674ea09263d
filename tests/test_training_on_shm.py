"""PyTorch's own parallel training gives the same losses on the shm backend as on Gloo.

Two ranks add in one order only, so there the losses are equal to the bit; four may differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gradmesh_pytest.running import World
from tests.conftest import Worlds

pytestmark = pytest.mark.processes
STEPS = 20


class Net(nn.Module):
    """A residual block and a head, with uneven widths, so that shards are uneven too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + self.down(torch.tanh(self.up(x))))
        return out


def ddp(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    # Buckets of a few hundred bytes, so that several all_reduces are under way at once.
    wrapped = DistributedDataParallel(net, bucket_cap_mb=0.0003, gradient_as_bucket_view=True)
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)


def zero(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    # Imported here, in the ranks, as it warns of its own use of TorchScript.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(net)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01)


def fsdp2(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.Adam(net.parameters(), lr=0.01)


def tensor_parallel(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


class Words(nn.Module):
    """An embedding whose gradient is sparse, before the same head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding((x[:, 0].abs() * 10).long().clamp(max=39)))
        return out


def sparse_ddp(_: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(Words())
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.5)


PARALLEL: dict[str, Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "DDP": ddp,
    "DDP with sparse gradients": sparse_ddp,
    "FSDP2": fsdp2,
    "DTensor": tensor_parallel,
    "ZeRO": zero,
}


def losses(kind: str) -> list[float]:
    """The losses of a short training, the mean over the ranks."""
    torch.manual_seed(0)
    net, optimizer = PARALLEL[kind](Net())
    same_data = kind == "DTensor"
    out = []
    for step in range(STEPS):
        rank = 0 if same_data else dist.get_rank()
        generator = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(16, 6, generator=generator)
        y = torch.sin(2 * x[:, :3])
        optimizer.zero_grad()
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        mean = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach().double().clone()
        dist.all_reduce(mean)
        out.append(mean.item() / dist.get_world_size())
    return out


Pools = dict[tuple[str, int], World]


@pytest.fixture(scope="module")
def pools(worlds: Worlds) -> Pools:
    return {(backend, n): worlds(n, backend, 120) for backend in ("gloo", "shm") for n in (2, 4)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", PARALLEL)
def test_training_has_the_losses_of_gloo(kind: str, size: int, pools: Pools) -> None:
    on_gloo = pools["gloo", size].run(losses, kind)
    on_shm = pools["shm", size].run(losses, kind)
    assert on_gloo[0][0] > 1.2 * on_gloo[0][-1]  # it learns something, and does not stand still
    assert all(each == on_shm[0] for each in on_shm)
    if size == 2:
        assert on_shm == on_gloo
    else:
        torch.testing.assert_close(torch.tensor(on_shm), torch.tensor(on_gloo), rtol=2e-5, atol=0)


def redistributed() -> list[list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(7.0 * 5).reshape(7, 5).requires_grad_()  # uneven along both dims
    held = DTensor.from_local(whole, mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
    other = held.redistribute(mesh, [Shard(1)])
    weights = distribute_tensor(torch.arange(35.0).reshape(7, 5).cos(), mesh, [Shard(1)])
    total = (other * other * weights).sum()
    assert isinstance(total, DTensor)
    total.full_tensor().backward()
    grad = whole.grad
    assert grad is not None
    return [*other.full_tensor().tolist(), *grad.tolist()]


@pytest.mark.parametrize("size", [2, 4])
def test_a_dtensor_is_redistributed_unevenly_as_on_gloo(size: int, pools: Pools) -> None:
    assert pools["shm", size].run(redistributed) == pools["gloo", size].run(redistributed)
