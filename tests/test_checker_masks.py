"""A random mask that differs between ranks is a fault where they share one sample's activation, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmesh.checker.run import Target, check_script

pytestmark = pytest.mark.processes

PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad

class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
{model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed({seed})
for step in range(2):
    tokens = torch.randint(0, 16, (4, 6){generator})
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

PLACES = """
class Model(nn.Module):  # dropout of the embedded positions, which are the same on all ranks; the tokens are not
    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(16, 8), nn.Embedding(6, 8), nn.Linear(8, 16)

    def forward(self, tokens):
        return self.head(self.words(tokens) + {places})

model = {wrapped}
"""
DROPPED = "F.dropout(self.places(torch.arange(6)), 0.2)"

EXPERTS = """
class Model(nn.Module):  # the experts' parts of one batch
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        with torch.random.fork_rng():
            torch.manual_seed(10 + rank)
            self.expert = nn.Linear(8, 8)

    def forward(self, tokens):
        x = {words}
        here = (tokens % world == rank).unsqueeze(-1)  # an expert for each word
        mine = {mine}
        return self.head(Sum.apply(self.expert(mine) * here))

model = Model()
"""
WORDS = "Copy.apply(self.words(tokens))"


def rules(folder: Path, model: str, seed: str, generator: str) -> list[str]:
    script = folder / "train.py"
    script.write_text(
        PROGRAM.replace("{model}", model).replace("{seed}", seed).replace("{generator}", generator)
    )
    return [each.rule.id for each in check_script(Target(str(script)), ranks=2).findings]


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"])
@pytest.mark.parametrize("places", [DROPPED, "self.places(torch.arange(6)) * (tokens > 3).unsqueeze(-1)"])
def test_parameters_may_be_masked_for_each_ranks_own_data(tmp_path: Path, wrapper: str, places: str) -> None:
    device = ", device_id=torch.device('cpu')" if wrapper == "FullyShardedDataParallel" else ""
    model = PLACES.replace("{places}", places).replace("{wrapped}", f"{wrapper}(Model(){device})")
    assert rules(tmp_path, model, "3 + rank", "") == []


def test_sparse_data_are_not_compared(tmp_path: Path) -> None:
    mixed = "torch.sparse.mm(torch.eye(6).to_sparse(), self.places.weight)"
    model = PLACES.replace("{places}", f"{mixed} + {DROPPED}").replace(
        "{wrapped}", "DistributedDataParallel(Model())"
    )
    assert rules(tmp_path, model, "3 + rank", "") == []


@pytest.mark.parametrize(
    "mine",
    [
        "x * here",
        "x.masked_fill(~here, 0.0)",
        "torch.where(here, x, torch.zeros_like(x))",
        "x * here.float()",
    ],
)
def test_ranks_may_take_parts_of_their_own_by_one_draw(tmp_path: Path, mine: str) -> None:
    model = EXPERTS.replace("{words}", WORDS).replace("{mine}", mine)
    assert rules(tmp_path, model, "3", "") == []


@pytest.mark.parametrize(
    "words",
    [f"F.dropout({WORDS}, 0.2)", "Copy.apply(F.dropout(self.words(tokens), 0.2))"],
    ids=["after", "before"],
)
def test_ranks_that_work_on_one_batch_have_to_drop_alike(tmp_path: Path, words: str) -> None:
    model = EXPERTS.replace("{words}", words).replace("{mine}", "x * here")
    assert "GM302" in rules(tmp_path, model, "3 + rank", ", generator=torch.Generator().manual_seed(step)")
    assert rules(tmp_path, model, "3", ", generator=torch.Generator().manual_seed(step)") == []


def test_copies_that_a_sum_made_have_to_be_dropped_alike(tmp_path: Path) -> None:
    model = EXPERTS.replace("{words}", WORDS).replace(
        "{mine}", "x * here + torch.full((1,), 0.1 * rank)"
    )  # data of its own
    model = model.replace("self.head(Sum.apply(", "self.head(F.dropout(Sum.apply(").replace(
        "* here))", "* here), 0.2))"
    )
    assert "GM302" in rules(tmp_path, model, "3 + rank", ", generator=torch.Generator().manual_seed(step)")
