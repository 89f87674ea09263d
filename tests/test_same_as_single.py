"""same_as_single: parallel programs equal one process, and a difference is named by step, name and rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm
from gradmesh.errors import GradcheckError
from gradmesh.verify import Input, Shard, SingleReport, same_as_single
from gradmesh.verify.gradients import diagnosis as h


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Mlp(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, hidden), nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.tanh(self.a(x)))
        return y


class Cut(nn.Module):
    """The same, its hidden layer cut over the ranks."""

    def __init__(self, _: nn.Module) -> None:
        super().__init__()
        part = gm.axis().slice(8)
        size = part.stop - part.start
        self.a, self.b = nn.Linear(3, size).double(), nn.Linear(size, 2).double()
        self.first = gm.I

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(gm.replicate(x)))
        return gm.all_reduce(F.linear(hidden, self.b.weight), dst=gm.I) + self.b.bias


CUT: dict[str, Shard | gm.Type] = {"a.*": Shard(dim=0), "b.weight": Shard(dim=1), "b.bias": gm.I}
X = normal(6, 3)


def mse(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    y = model(x)
    return y.square().mean(), {"y": y.detach()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensor_parallel_parameters_have_their_parts(ranks: int) -> None:
    report = same_as_single(
        mse,
        inputs=(Input(X, gm.I),),
        module=Mlp,
        parallel=Cut,
        parameters=CUT,
        world_size=ranks,
        steps=3,
        objective="replicated",
        optimizer=torch.optim.Adam,
    )
    assert report.compared == 3 * (3 * ranks + 2 * 4 * ranks)


def test_other_batches_in_each_step_and_uneven_shards_under_a_global_mean() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        rows = gm.all_reduce(torch.tensor(float(len(x)), dtype=torch.float64), dst=gm.R)
        return model(x).square().sum() / (2 * rows)

    def batch(step: int) -> tuple[object, ...]:
        return (Shard(normal(6, 3, seed=step), sizes=(1, 3, 2)),)

    assert same_as_single(loss, inputs=batch, module=Mlp, world_size=3, steps=3).ok


def by_fsdp(module: nn.Module) -> nn.Module:
    fully_shard(module.get_submodule("a"))
    fully_shard(module)
    return module


@pytest.mark.parametrize(
    ("parallel", "places"),
    [(DistributedDataParallel, {"*": gm.I}), (DistributedDataParallel, {}), (by_fsdp, {})],
    ids=["ddp", "ddp by default", "fsdp2"],
)
def test_data_parallel_wrappers_are_the_single_process(parallel: Any, places: Any) -> None:
    report = same_as_single(
        lambda model, x: model(x).square().mean(),
        inputs=(Shard(X, constant=True),),
        module=Mlp,
        parallel=parallel,
        parameters=places,
        world_size=2,
        steps=3,
        objective="mean",
    )
    assert report.ok


def uneven(**options: Any) -> SingleReport:
    return same_as_single(
        lambda model, x: model(x).square().mean(),
        inputs=(Shard(X, sizes=(1, 5), constant=True),),
        module=Mlp,
        parallel=DistributedDataParallel,
        parameters={"*": gm.I},
        world_size=2,
        objective="mean",
        **options,
    )


def test_a_mean_of_local_means_is_called_one() -> None:
    report = uneven(raise_exception=False)
    assert report.first[0].kind == "loss"
    assert report.diagnosis is not None
    assert report.diagnosis.hypothesis == h.MEANS
    assert "0.1667, 0.8333" in report.diagnosis.text
    with pytest.raises(GradcheckError, match="mean of local means"):
        uneven()


def test_a_wrong_gradient_is_named_with_its_parameters_ranks_and_line() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(gm.all_gather(torch.tanh(x), dst=gm.I)).square().mean() / gm.world_size()

    report = same_as_single(loss, inputs=(Shard(X),), module=Mlp, world_size=2, raise_exception=False)
    assert {(each.step, each.kind, each.name) for each in report.first} == {(0, "gradient", "inputs[0]")}
    assert [each.rank for each in report.first] == [0, 1]
    assert report.diagnosis is not None
    assert "test_same_as_single.py" in report.diagnosis.suspects[0].call


def test_a_sum_that_a_replica_misses_is_called_that() -> None:
    report = same_as_single(
        lambda model, x: model(x).square().mean(),
        inputs=(Shard(X, constant=True),),
        module=Mlp,
        parameters={"*": gm.I},
        world_size=2,
        objective="mean",
        raise_exception=False,
    )
    assert report.diagnosis is not None
    assert report.diagnosis.hypothesis == h.SUM_MISSING
    assert report.diagnosis.names == ["a.bias", "a.weight", "b.bias", "b.weight"]


def test_first_diverging_step_is_named() -> None:
    class Forgets(torch.optim.SGD):
        """Takes its second step on rank 0 alone."""

        taken = 0

        def step(self, closure: Any = None) -> Any:
            self.taken += 1
            return None if self.taken == 2 and gm.rank() == 1 else super().step(closure)

    report = same_as_single(
        lambda model, x: gm.all_reduce(model(x).square().sum(), dst=gm.I),
        lambda model, x: model(x).square().sum(),
        inputs=(Shard(X),),
        module=Mlp,
        world_size=2,
        objective="replicated",
        steps=4,
        optimizer=lambda parameters: Forgets(parameters, lr=0.01),
        raise_exception=False,
    )
    assert {(each.step, each.kind, each.rank) for each in report.first} == {(1, "parameter", 1)}


def test_a_value_is_compared_as_it_lies() -> None:
    def loss(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x.square().sum(), {"y": 2 * x.detach() + gm.rank()}

    report = same_as_single(
        loss, inputs=(Shard(X),), outputs={"y": Shard()}, world_size=3, raise_exception=False
    )
    assert [(each.kind, each.name, each.rank) for each in report.first] == [
        ("value", "y", 1),
        ("value", "y", 2),
    ]


def test_shapes_that_differ_are_shown() -> None:
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = model(x)
        return y.square().sum(), {"y": y.detach()}

    report = same_as_single(loss, inputs=(Shard(X),), module=Mlp, world_size=2, raise_exception=False)
    assert "value y on rank 0 has shape [3, 2], expected [6, 2]" in str(report)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"inputs": (Shard(X, sizes=(1, 1)),)}, "do not add up to the tensor's size"),
        ({"inputs": (X,), "parallel": Cut}, "does not match its placement"),
        ({"inputs": (X,), "parallel": lambda m: nn.Sequential(m)}, "unknown parameter name"),
        ({"inputs": (X,), "distributed": lambda m, x: 3.0}, "does not return a scalar loss"),
        ({"inputs": (X,), "distributed": lambda m, x: m(x)}, "does not return a scalar loss"),
        ({"inputs": (X,), "distributed": lambda m, x: None}, "return None and pass ordered=True"),
        ({"inputs": (X,), "distributed": lambda m, x: x.sum()}, "does not require grad"),
        ({"inputs": (X,), "distributed": lambda m, x: (m(x).sum(), 1)}, "invalid second return value"),
        (
            {"inputs": (X,), "distributed": lambda m, x: (m(x).sum(), {}), "reference": mse},
            "different values",
        ),
        ({"inputs": (X,), "distributed": mse, "reference": lambda m, x: m(x).sum()}, "different values"),
        ({"inputs": (X,), "parameters": {"c.*": gm.I}}, "pattern in parameters matches no name"),
        ({"inputs": (X,), "outputs": {"out": Shard()}}, "pattern in outputs matches no name"),
        ({"inputs": (X,), "steps": 0}, "invalid steps"),
        ({"inputs": (X,), "objective": "last"}, "invalid objective"),
        ({"inputs": (X,), "world_size": 0}, "invalid world_size"),
    ],
)
def test_invalid_comparisons_raise(options: dict[str, Any], text: str) -> None:
    with pytest.raises(gm.ArgumentError, match=text):
        same_as_single(**{"distributed": mse, "module": Mlp, "world_size": 2, **options})


def test_a_rank_without_a_loss_counts_as_zero_in_order() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor | None:
        rows = gm.all_gather(model(x))
        return rows.square().sum() if gm.rank() == 0 else None

    assert same_as_single(loss, inputs=(Shard(X),), module=Mlp, world_size=2, steps=2, ordered=True).ok
    assert not same_as_single(
        loss,
        lambda model, x: 2 * model(x).square().sum(),
        inputs=(Shard(X),),
        module=Mlp,
        world_size=2,
        ordered=True,
        raise_exception=False,
    ).ok
