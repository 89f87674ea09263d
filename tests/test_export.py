"""Exported and scripted programs that hold verbs: trained, saved and loaded, they have their module's derivatives."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import gradmesh as gm
from gradmesh.autograd.traced import Encoded, decode, encode
from gradmesh.ops.registry import REGISTRY
from tests.conftest import Worlds

pytestmark = pytest.mark.processes

W = 2
VERBS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_gather, R": gm.all_gather,
    "all_gather, I": lambda x: gm.all_gather(x, dst=gm.I),
    "all_gather of sizes": lambda x: gm.all_gather(x[: 1 + gm.rank()], sizes=(1, 2)),
    "all_gather in bfloat16": lambda x: gm.all_gather(x, comm_dtype=torch.bfloat16),
    "all_gather, async": lambda x: gm.all_gather(x, async_op=True).wait(),
    "all_reduce, R": lambda x: gm.all_reduce(x, dst=gm.R),
    "all_reduce, I": lambda x: gm.all_reduce(x, dst=gm.I),
    "mean": lambda x: gm.all_reduce(x, op="mean", dst=gm.R),
    "max": lambda x: gm.all_reduce(x, op="max", dst=gm.R),
    "logsumexp": lambda x: gm.all_reduce(x, op="logsumexp", dst=gm.R),
    "reduce_scatter": gm.reduce_scatter,
    "all_to_all": gm.all_to_all,
    "broadcast": gm.broadcast,
    "shift": gm.shift,
    "halo_exchange": gm.halo_exchange,
    "scan": gm.scan,
    "replicate": gm.replicate,
    "shard, I": gm.shard,
    "shard, R": lambda x: gm.shard(x, src=gm.R),
    "R to I": lambda x: gm.convert(x, src=gm.R, dst=gm.I),
    "R to P": lambda x: gm.convert(x, src=gm.R, dst=gm.P),
}


class Layer(nn.Module):
    def __init__(self, verb: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))
        self.verb = VERBS[verb]

    def forward(self, x: Tensor) -> Tensor:
        return self.verb(x * self.w).square().sum()


def rows() -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(5 + gm.rank()))


def derivatives(module: nn.Module) -> list[Tensor]:
    """Of losses that differ between the ranks: the value, first derivatives, and one of second order."""
    x = rows().requires_grad_()
    loss = module(x) * (1 + gm.rank())
    first = torch.autograd.grad(loss, [x, *module.parameters()], create_graph=True)
    (second,) = torch.autograd.grad(first[0].square().sum() * (2 + gm.rank()), x)
    return [loss.detach(), *(d.detach() for d in first), second]


def exported(verb: str) -> nn.Module:
    return torch.export.export(Layer(verb), (rows(),)).module()


def exported_without_gradients(verb: str) -> nn.Module:
    with torch.no_grad():
        return exported(verb)


def saved(verb: str) -> nn.Module:
    file = io.BytesIO()
    torch.export.save(torch.export.export(Layer(verb), (rows(),)), file)
    file.seek(0)
    return torch.export.load(file).module()


def scripted(verb: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced: nn.Module = torch.jit.trace(Layer(verb), (rows(),))
    return traced


def scripted_and_saved(verb: str) -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(scripted(verb), file)
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded: nn.Module = torch.jit.load(file)
    return loaded


WAYS = (exported, exported_without_gradients, saved, scripted, scripted_and_saved)


def unlike_the_module(make: Callable[[str], nn.Module]) -> list[str]:
    def wrong() -> Iterator[str]:
        for verb in VERBS:
            expected = derivatives(Layer(verb))
            for number, (mine, its) in enumerate(zip(derivatives(make(verb)), expected, strict=True)):
                if not torch.allclose(mine, its, rtol=1e-5, atol=1e-6):
                    yield f"{verb}, derivative {number}: {mine} for {its}"

    return list(wrong())


@pytest.mark.parametrize("make", WAYS, ids=[way.__name__ for way in WAYS])
def test_a_recorded_program_has_the_derivatives_of_its_module(
    make: Callable[[str], nn.Module], worlds: Worlds
) -> None:
    assert worlds(W, "shm", 60).run(unlike_the_module, make) == [[]] * W


def trained() -> tuple[list[float], list[float]]:
    """Losses of a few steps of the module, and of the program that it was exported as."""
    losses: list[list[float]] = []
    for module in (Layer("all_gather, R"), saved("all_gather, R")):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            loss = module(rows())
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    return losses[0], losses[1]


def test_a_loaded_program_is_trained_as_its_module(worlds: Worlds) -> None:
    for module, program in worlds(W, "shm", 60).run(trained):
        assert module == program
        assert module[-1] < module[0]


# fmt: off
WRITTEN = {
    "AllGather", "AllGatherInvariant", "AllReduce", "AllReduceInvariant", "AllToAll", "Broadcast",
    "BroadcastInvariant", "Exscan", "Extents", "Gather", "HaloExchange", "HaloReturn", "InvariantToPartial",
    "KeepAtRoot", "Mean", "NeighborAllToAll", "NeighborReturn", "Pad", "PartialFromVarying", "Permute",
    "Picked", "Reduce", "ReduceScatter", "Replicate", "ReplicatedToInvariant", "ReplicatedToPartial",
    "Scan", "Scatter", "Shard", "ShardReplicated", "Shift", "Sizes", "VaryingFromReplicated",
}
# fmt: on
"""Names that stand in programs which were saved: a class that is called otherwise cannot be loaded from them."""


def names_in_programs() -> set[str]:
    axis = gm.axis()
    codes = [encode(op) for row in REGISTRY for op, _ in row.examples(axis)]
    assert all(decode(code) for code in codes)
    return {
        word
        for code in codes
        for word in code.words.split("\x1f")
        if word.isidentifier() and word[0].isupper()
    }


def test_names_in_saved_programs_are_stable(worlds: Worlds) -> None:
    for names in worlds(W, "shm", 60).run(names_in_programs):
        assert names - {"None", "True", "False"} == WRITTEN


def test_a_program_with_an_op_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(gm.ArgumentError, match=r"(?s)an unknown op, Teleport.*got\s+'Teleport'"):
        decode(Encoded("Teleport\x1f'world", [], [], ""))
