"""The verbs beside torch's own parallelism: gradients are those of a single process, on losses that differ by rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm
from gradmesh.types import Convention

pytestmark = pytest.mark.processes
Processes = Callable[[int], Callable[..., list[Any]]]
SIZE, ROWS = 2, 6


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


class Center(nn.Module):
    """Subtract the mean over the rows, which may lie on several ranks."""

    def __init__(self, mean: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mean(x.mean(0))


def local_mean(x: Tensor) -> Tensor:
    return x


def mean_over_ranks(x: Tensor) -> Tensor:
    return gm.all_reduce(x, op="mean", dst=gm.R)


def model(mean: Callable[[Tensor], Tensor] = local_mean) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), Center(mean), nn.Tanh(), nn.Linear(8, 4)).double()


class Scaled(nn.Module):
    """The model, and a parameter for use behind the gather, as the logit scale of CLIP is."""

    def __init__(self, mean: Callable[[Tensor], Tensor] = local_mean) -> None:
        super().__init__()
        self.net = model(mean)
        self.scale = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.scale.exp()


def batch() -> Tensor:
    return torch.randn(ROWS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def rank_loss(rows: Tensor, everything: Tensor, rank: int) -> Tensor:
    """One rank's loss: its rows against all rows, weighted by the rank."""
    return (1 + rank) * (rows @ everything.roll(1, 1).T).logsumexp(1).sum() / ROWS


def single_loss(y: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """The sum of the ranks' losses."""
    parts = (scale * y).split(ROWS // SIZE)
    return torch.stack([rank_loss(part, y, rank) for rank, part in enumerate(parts)]).sum()


def gradients(net: nn.Module) -> list[Tensor]:
    found = []
    for parameter in net.parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        found.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
    return found


def expected_gradients() -> list[Tensor]:
    net = Scaled()
    single_loss(*net(batch())).backward()
    return gradients(net)


# ---- Data parallelism ------------------------------------------------------------------------------------------------


def contrastive(net: nn.Module, factor: float) -> Tensor:
    """This rank's loss, with rows gathered from all ranks."""
    y, scale = net(gm.shard(batch()))
    return factor * rank_loss(scale * y, gm.all_gather(y), gm.axis().rank)


def one_for_all(net: nn.Module, factor: float, dst: Convention = gm.R) -> Tensor:
    """The same loss on every rank, over the rows of all."""
    y, scale = net(gm.shard(batch()))
    whole = gm.all_gather(y, dst=dst)
    return factor * single_loss(whole, scale)


def ddp() -> nn.Module:
    return DistributedDataParallel(Scaled(mean_over_ranks))


def fsdp(divide: float | None = None) -> nn.Module:
    mesh = gm.mesh(dp=-1)
    net = Scaled(mean_over_ranks)
    for layer in (net.net[0], net.net[3], net):
        fully_shard(layer, mesh=mesh)
    for module in net.modules():
        if isinstance(module, FSDPModule) and divide is not None:
            module.set_gradient_divide_factor(divide)
    return net


def trained(
    wrap: Callable[..., nn.Module], divide: tuple[float, ...], loss: Callable[..., Tensor], *args: object
) -> list[Tensor]:
    net = wrap(*divide)
    loss(net, *args).backward()
    return gradients(net)


DATA_PARALLEL: dict[str, tuple[Any, ...]] = {
    "DDP, loss times W": (ddp, (), contrastive, SIZE),
    "FSDP, loss times W": (fsdp, (), contrastive, SIZE),
    "FSDP, divided by 1": (fsdp, (1.0,), contrastive, 1),
    "DDP, one loss for all": (ddp, (), one_for_all, 1),
    "FSDP, one loss for all": (fsdp, (), one_for_all, 1),
}


@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_verbs_in_data_parallelism(name: str, processes: Processes) -> None:
    for found in processes(SIZE)(trained, *DATA_PARALLEL[name]):
        for got, want in zip(found, expected_gradients(), strict=True):
            close(got, want)


@pytest.mark.parametrize("wrap", [ddp, fsdp], ids=["DDP", "FSDP"])
def test_without_the_scale_averaging_takes_a_factor_w(
    wrap: Callable[[], nn.Module], processes: Processes
) -> None:
    found = processes(SIZE)(trained, wrap, (), contrastive, 1)[0]
    for got, want in zip(found, expected_gradients(), strict=True):
        close(got * SIZE, want)


@pytest.mark.parametrize("wrap", [ddp, fsdp], ids=["DDP", "FSDP"])
def test_no_factor_fits_one_loss_through_an_invariant_gather(
    wrap: Callable[[], nn.Module], processes: Processes
) -> None:
    names = [name for name, _ in Scaled().named_parameters()]
    found = processes(SIZE)(trained, wrap, (), one_for_all, 1, gm.I)[0]
    for name, got, want in zip(names, found, expected_gradients(), strict=True):
        close(got if name == "scale" else got * SIZE, want)


def one_rank_in_ddp() -> list[Tensor]:
    """Only rank 0 has a loss."""
    net = DistributedDataParallel(model())
    with gm.ordered():
        y = gm.all_gather(net(gm.shard(batch())))
        gm.backward(SIZE * (y**3).sum() if gm.axis().rank == 0 else None)
    return gradients(net)


def test_a_rank_without_a_loss_in_ddp(processes: Processes) -> None:
    net = model()
    parts = [net(part) for part in batch().split(ROWS // SIZE)]
    (torch.cat(parts) ** 3).sum().backward()
    for found in processes(SIZE)(one_rank_in_ddp):
        for got, want in zip(found, gradients(net), strict=True):
            close(got, want)


# ---- Tensor parallelism ----------------------------------------------------------------------------------------------


def normed(net: nn.Sequential, x: Tensor, square_sum: Callable[[Tensor], Tensor]) -> Tensor:
    """A layer, a norm over its features, another layer."""
    hidden = net[2](net[0](x))
    hidden = hidden / (1 + square_sum((hidden**2).sum(-1, keepdim=True))).sqrt()
    out: Tensor = net[3](hidden)
    return out


def in_tensor_parallelism() -> tuple[list[Tensor], Tensor]:
    mesh = gm.mesh(tp=-1)
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    assert isinstance(net, nn.Sequential)
    x = batch().requires_grad_()
    y = normed(
        net, x, lambda part: gm.all_reduce(part, "tp", dst=gm.R)
    )  # between the layers each has its features
    rank = gm.axis("tp").rank
    own = gm.shard(y, "tp")  # the layers' result is the same on every rank: type I
    rank_loss(own, gm.replicate(y, "tp"), rank).backward()
    assert x.grad is not None
    return gradients(net), x.grad


def test_verbs_between_tensor_parallel_layers(processes: Processes) -> None:
    net, x = model(), batch().requires_grad_()
    single_loss(normed(net, x, lambda part: part)).backward()
    assert x.grad is not None
    for found, x_grad in processes(SIZE)(in_tensor_parallelism):
        close(x_grad, x.grad)
        for got, want in zip(found, gradients(net), strict=True):
            close(got, want)


# ---- DTensor ---------------------------------------------------------------------------------------------------------


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def whole() -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def weights(rank: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3 + rank))


# How a placement leads to a verb: the placement, that of the gradient, this rank's loss of the local tensor, and the
# same loss in one process, of the whole tensor.
Recipe = tuple[Placement, Placement, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def weighted(y: Tensor, rank: int) -> Tensor:
    return (weights(rank, tuple(y.shape)) * y**2).sum()


def each_rank(x: Tensor) -> Tensor:
    return torch.stack([weighted(x, rank) for rank in range(SIZE)]).sum()


RECIPES: dict[str, Recipe] = {
    "Shard is V": (
        Shard(0),
        Shard(0),
        lambda x: weighted(gm.all_gather(x), gm.axis().rank),
        each_rank,
    ),
    "Shard(1) is V": (
        Shard(1),
        Shard(1),
        lambda x: weighted(gm.all_gather(x, dim=1, sizes="auto"), gm.axis().rank),
        each_rank,
    ),
    "Replicate is R": (
        Replicate(),
        Partial(),
        lambda x: (
            weighted(gm.all_gather(gm.shard(x, src=gm.R)), gm.axis().rank) + weighted(x, gm.axis().rank)
        ),
        lambda x: 2 * each_rank(x),
    ),
    "Replicate is I": (
        Replicate(),
        Replicate(),
        lambda x: (
            weighted(gm.replicate(x), gm.axis().rank) + weighted(gm.all_gather(gm.shard(x)), gm.axis().rank)
        ),
        lambda x: 2 * each_rank(x),
    ),
    "Partial is P": (
        Partial(),
        Replicate(),
        lambda x: weighted(gm.all_reduce(x, dst=gm.R), gm.axis().rank),
        each_rank,
    ),
    "Partial is P, scattered": (
        Partial(),
        Replicate(),
        lambda x: weighted(gm.all_gather(gm.reduce_scatter(x)), gm.axis().rank),
        each_rank,
    ),
}


def as_dtensor(placement: Placement) -> tuple[Tensor, DTensor]:
    """A DTensor of the whole tensor, and the leaf that it is made of."""
    mesh = gm.mesh(tp=-1)
    if placement.is_partial():
        leaf = whole() * (0.25, 0.75)[gm.axis().rank]
        leaf.requires_grad_()
        return leaf, DTensor.from_local(leaf, mesh, [placement])
    leaf = distribute_tensor(whole(), mesh, [placement]).requires_grad_()
    return leaf, leaf


def out_of_dtensor(name: str) -> tuple[bool, Tensor]:
    placement, grad_placement, loss, _ = RECIPES[name]
    leaf, x = as_dtensor(placement)
    local = x.to_local(grad_placements=[grad_placement])
    loss(local).backward()
    grad = leaf.grad
    assert grad is not None
    return storage(local) == storage(x._local_tensor), grad.full_tensor() if isinstance(
        grad, DTensor
    ) else grad


@pytest.mark.parametrize("name", RECIPES)
def test_a_dtensor_leads_to_verbs_without_a_copy(name: str, processes: Processes) -> None:
    x = whole().requires_grad_()
    RECIPES[name][3](x).backward()
    assert x.grad is not None
    for shared, grad in processes(SIZE)(out_of_dtensor, name):
        assert shared
        close(grad, x.grad)


def without_a_sum() -> Tensor:
    """A tensor that each rank uses differently, its gradient taken for whole."""
    x = as_dtensor(Replicate())[1]
    weighted(gm.all_gather(gm.shard(x.to_local(), src=gm.R)), gm.axis().rank).backward()
    assert isinstance(x.grad, DTensor)
    return x.grad.full_tensor()


def test_the_wrong_placement_of_the_gradient_is_seen(processes: Processes) -> None:
    """The comparison can fail: each rank is left with a gradient of its own."""
    one, other = processes(SIZE)(without_a_sum)
    assert (one - other).abs().max() > 0.1


# How a verb's result of each type leads to a DTensor: the result, its placement, the whole tensor that it stands for.
BACK: dict[str, tuple[Callable[[Tensor], Tensor], Placement, Callable[[list[Tensor]], Tensor]]] = {
    "V": (lambda x: gm.shift(x), Shard(0), lambda xs: torch.cat(xs[-1:] + xs[:-1])),
    "P": (lambda x: gm.convert(x, src=gm.V, dst=gm.P), Partial(), lambda xs: torch.stack(xs).sum(0)),
    "I": (lambda x: gm.all_reduce(x, dst=gm.I), Replicate(), lambda xs: torch.stack(xs).sum(0)),
    "R": (
        lambda x: gm.convert(gm.all_gather(x), src=gm.R, dst=gm.I),
        Replicate(),
        lambda xs: torch.cat(xs),
    ),
}


def into_dtensor(name: str) -> tuple[bool, Tensor, Tensor, Tensor]:
    mesh = gm.mesh(tp=-1)
    x = weights(gm.axis().rank, (2, 3)).requires_grad_()
    y = BACK[name][0](x)
    there = DTensor.from_local(y, mesh, [BACK[name][1]])
    loss = (there**3).sum()
    assert isinstance(loss, DTensor)
    loss = loss.full_tensor()
    loss.backward()
    assert x.grad is not None
    return storage(there._local_tensor) == storage(y), there.full_tensor().detach(), x.grad, loss.detach()


@pytest.mark.parametrize("name", BACK)
def test_a_verbs_result_leads_to_a_dtensor_without_a_copy(name: str, processes: Processes) -> None:
    leaves = [weights(rank, (2, 3)).requires_grad_() for rank in range(SIZE)]
    value = BACK[name][2](leaves)
    loss = (value**3).sum()
    loss.backward()
    for leaf, (shared, got, grad, got_loss) in zip(leaves, processes(SIZE)(into_dtensor, name), strict=True):
        assert shared
        close(got, value.detach())
        close(got_loss, loss.detach())
        assert leaf.grad is not None
        close(grad, leaf.grad)


def refused() -> dict[str, str]:
    mesh = gm.mesh(tp=-1)
    x = distribute_tensor(whole(), mesh, [Shard(0)])
    found = {}
    verbs: dict[str, Callable[[Any], object]] = {
        "all_gather": gm.all_gather,
        "all_reduce": lambda x: gm.all_reduce(x, op="max", dst=gm.R),
        "replicate": lambda x: gm.replicate(nn.Parameter(x)),
        "sizes": gm.sizes,
    }
    for name, verb in verbs.items():
        try:
            verb(x)
        except gm.ArgumentError as error:
            found[name] = str(error)
    return found


def test_a_dtensor_itself_is_refused_with_the_way_out(processes: Processes) -> None:
    for found in processes(SIZE)(refused):
        assert set(found) == {"all_gather", "all_reduce", "replicate", "sizes"}
        for name, text in found.items():
            assert text.startswith(f"gradmesh.{name}: DTensor operands are not supported")
            assert "Shard(dim=0)" in text
            assert "to_local(grad_placements=" in text


def pending() -> tuple[list[float], list[float]]:
    """A result of torch's functional collectives that was not waited for."""
    mesh = gm.mesh(tp=-1)
    x = distribute_tensor(whole(), mesh, [Shard(0)])
    x.requires_grad_()
    local = x.redistribute(mesh, [Replicate()], async_op=True).to_local(grad_placements=[Partial()])
    assert isinstance(local, AsyncCollectiveTensor)
    y = gm.all_gather(local.view(-1))
    weighted(y, gm.axis().rank).backward()
    assert isinstance(x.grad, DTensor)
    return y.tolist(), x.grad.full_tensor().reshape(-1).tolist()


def test_a_dtensor_still_under_way_is_waited_for(processes: Processes) -> None:
    flat = whole().view(-1).requires_grad_()
    y = flat.repeat(SIZE)
    torch.stack([weighted(y, rank) for rank in range(SIZE)]).sum().backward()
    assert flat.grad is not None
    for got, grad in processes(SIZE)(pending):
        assert got == y.tolist()
        close(torch.tensor(grad, dtype=torch.float64), flat.grad)
