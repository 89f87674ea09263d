"""`gm.typed` around what wraps tensors: functional collectives, DTensor, DDP, FSDP1, FSDP2, compiled functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import gradmesh as gm
from tests.conftest import Run, Worlds

pytestmark = pytest.mark.processes


def own(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(dist.get_rank()))


def functional_collectives() -> object:
    weight, x, group = nn.Parameter(torch.arange(3.0) + 1), own(4, 3), dist.group.WORLD
    assert group is not None
    with gm.typed() as types:
        total = functional.all_reduce((x * weight).sum(0), "sum", group)
        whole = functional.all_gather_tensor(x, 0, group)
        rows = functional.reduce_scatter_tensor(whole * 1.0, "sum", 0, group)
        same = gm.assert_type(functional.all_reduce(x, "sum", group), gm.R)
        reported = [str(types.of(one)["world"]) for one in (total, whole, rows, same)]
    return reported, type(total).__name__, [finding.short for finding in types.findings], types.notes


def test_results_of_functional_collectives_have_a_type(worlds: Worlds) -> None:
    for found in worlds(2, "gloo", 240).run(functional_collectives):
        assert found == (["R", "R", "V", "R"], "AsyncCollectiveTensor", [], [])


REFUSED = "gradmesh.assert_type: a tensor declared as R differs between ranks"


def dtensors() -> object:
    mesh = gm.mesh(tp=-1)
    x = torch.arange(8.0).view(4, 2)
    rows, whole = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(x, mesh, [Replicate()])
    with gm.typed("tp") as types:
        pending = rows.t() @ rows
        assert isinstance(pending, DTensor)
        gm.assert_type(whole, {"tp": gm.R})
        reported = [
            str(types.of(one)["tp"]) for one in (rows, whole, pending.redistribute(mesh, [Replicate()]))
        ]
        try:
            gm.assert_type(rows, {"tp": gm.R})
        except gm.TypeMismatchError as error:
            reported.append(str(error).splitlines()[0])
    return reported, types.findings


def test_dtensor_has_the_type_of_its_local_shard(worlds: Worlds) -> None:
    for found in worlds(2, "gloo", 240).run(dtensors):
        assert found == (["V", "R", "R", REFUSED], [])


def trained(wrap: Callable[[nn.Module], nn.Module], sharded: bool) -> object:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gm.typed() as types:
            for _ in range(2):
                optimizer.zero_grad()
                model(own(4, 6)).square().mean().backward()
                optimizer.step()
    assert not [one for one in caught if "data pointer" in str(one.message)]
    parts = {type(parameter) is nn.Parameter for parameter in model.parameters()}
    return parts == {not sharded}, [finding.short for finding in types.findings]


def ddp() -> object:
    return trained(nn.parallel.DistributedDataParallel, sharded=False)


def alone() -> object:
    return trained(lambda model: model, sharded=False)


def fsdp1() -> object:
    return trained(
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")), sharded=False
    )


def fsdp2() -> object:
    def wrap(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return trained(wrap, sharded=True)


@pytest.mark.parametrize("wrapper", [ddp, fsdp1, fsdp2])
def test_training_under_a_wrapper_of_torchs_has_no_finding(
    wrapper: Callable[[], object], worlds: Worlds
) -> None:
    assert worlds(2, "gloo", 240).run(wrapper) == [(True, [])] * 2


def test_without_the_wrapper_the_missing_sum_is_found(worlds: Worlds) -> None:
    for _, found in worlds(2, "gloo", 240).run(alone):
        assert any(short.startswith("missing-sum") for short in found)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(gm.all_reduce(gm.assert_type(x @ weight, gm.P) + bias, dst=gm.I))


@pytest.mark.filterwarnings("ignore::gradmesh.CheckWarning")
def test_compiled_function_is_traced_operator_by_operator(threads: Callable[[int], Run]) -> None:
    def on_each_rank() -> list[str]:
        x, weight, bias = own(4, 3), own(3, 5), torch.arange(5.0, requires_grad=True)
        compiled = torch.compile(layer)
        with gm.typed() as types:
            compiled(x, weight, bias).sum()
        return [finding.short for finding in types.findings]

    for (found,) in threads(2)(on_each_rank):
        assert found.startswith("counts-many-times: aten.add at test_typed_wrapped.py:")
