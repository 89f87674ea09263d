"""Small language models with random shapes, dense and cut over ranks, for the tests of tensor parallel layers."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import gradmesh as gm
from gradmesh.ops.sizes import balanced

IGNORED = -100


@dataclass(frozen=True)
class Program:
    """What one program does.

    Attributes:
        seed: of the values.
        vocabulary: its size.
        width: of the vectors.
        hidden: of the layers between.
        length: of the sequence.
        batch: how many sequences.
        blocks: how many pairs of layers.
        sequence: the dim that is cut between the pairs, or None.
        tied: whether the head is the table.
        head: how the loss is made: of whole logits, of the ranks' own, or of tiles; or of own rows, differently on each
            rank.
        smoothing: of the labels.
        others: whether it is over all tokens except the target.
        z_loss: its weight.
        tile: tokens at a time.
        idle: a rank whose loss leaves its rows out; -1: there is none.
    """

    seed: int
    vocabulary: int = 11
    width: int = 4
    hidden: int = 6
    length: int = 5
    batch: int = 2
    blocks: int = 1
    sequence: int | None = None
    tied: bool = False
    head: str = "tiles"
    smoothing: float = 0.0
    z_loss: float = 0.0
    tile: int = 3
    idle: int = -1
    others: bool = False


def random_program(seed: int, ranks: int) -> Program:
    """A program drawn from a seed."""
    draw = random.Random(seed)
    sequence = draw.choice([None, 0, 1])
    return Program(
        seed,
        vocabulary=draw.choice([1, 3, 11, 17]),
        width=draw.choice([3, 4, 5]),
        hidden=draw.choice([1, 6, 9]),
        length=draw.choice([1, 2, 5, 7]),
        batch=draw.choice([1, 3]),
        blocks=draw.choice([1, 2]),
        sequence=sequence,
        tied=draw.random() < 0.5,
        head=draw.choice(["whole", "own", "tiles"] + ([] if sequence is None else ["rows", "rows"])),
        smoothing=draw.choice([0.0, 0.0, 0.1, 1.0]),
        z_loss=draw.choice([0.0, 0.01]),
        tile=draw.choice([1, 3, 100]),
        idle=draw.choice([-1, draw.randrange(ranks)]),
        others=draw.random() < 0.5,
    )


class Model(nn.Module):
    """Words to vectors, pairs of layers with a norm before each, and a head."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        kind = torch.float64
        self.table = nn.Embedding(program.vocabulary, program.width, dtype=kind)
        self.norms = nn.ModuleList(nn.LayerNorm(program.width, dtype=kind) for _ in range(program.blocks))
        self.ups = nn.ModuleList(
            nn.Linear(program.width, program.hidden, dtype=kind) for _ in range(program.blocks)
        )
        self.downs = nn.ModuleList(
            nn.Linear(program.hidden, program.width, dtype=kind) for _ in range(program.blocks)
        )
        self.head = nn.Linear(program.width, program.vocabulary, bias=not program.tied, dtype=kind)
        if program.tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(torch.tanh(up(norm(x))))
        return x


def model_of(program: Program) -> tuple[Model, Tensor, Tensor]:
    """The dense model, token ids and targets; the same on every rank, whatever the default generator does."""
    draw = torch.Generator().manual_seed(program.seed)
    model = Model(program)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    shape = (program.length, program.batch)
    ids = torch.randint(0, program.vocabulary, shape, generator=draw)
    target = torch.randint(0, program.vocabulary, shape, generator=draw)
    target.view(-1)[1:][torch.rand(target.numel() - 1, generator=draw) < 0.2] = IGNORED
    return model, ids, target


def factors(program: Program, ranks: int) -> Tensor:
    """By how much each row of the sequence counts in a loss that differs from rank to rank."""
    dim = program.sequence or 0
    rows = balanced((program.length, program.batch)[dim], ranks)
    weights = [float(1 + rank) * (rank != program.idle) for rank in range(ranks)]
    each = torch.cat([torch.full((n,), w, dtype=torch.float64) for n, w in zip(rows, weights, strict=True)])
    return each.view(-1, 1, 1) if dim == 0 else each.view(1, -1, 1)


def _labels(program: Program, target: Tensor) -> Tensor:
    """Each token's distribution over the vocabulary; zeros for an ignored one."""
    kept = (target != IGNORED).unsqueeze(-1)
    once = one_hot(torch.where(target != IGNORED, target, 0), program.vocabulary).double()
    rest = (
        (1 - once) / max(program.vocabulary - 1, 1)
        if program.others
        else torch.ones_like(once) / program.vocabulary
    )
    e = program.smoothing if program.vocabulary > 1 else 0.0
    return torch.where(kept, (1 - e) * once + e * rest, 0)


def dense_loss(program: Program, model: Model, ids: Tensor, target: Tensor, ranks: int) -> Tensor:
    x = model(ids)
    if program.head == "rows":
        return (factors(program, ranks) * x**3).sum()
    logits = model.head(x).view(-1, program.vocabulary)
    flat = target.view(-1)
    kept = flat != IGNORED
    loss = cross_entropy(logits, _labels(program, flat), reduction="none")
    z = torch.where(kept, logits.logsumexp(-1) ** 2, 0)
    return (loss + program.z_loss * z).sum() / kept.sum()


def loss_in_parts(program: Program, model: Model, ids: Tensor, target: Tensor) -> Tensor:
    """What a rank has of it: the loss itself, or its term where the losses differ."""
    x = model(ids)
    if program.head == "rows":
        return x.sum() * 0 if gm.rank() == program.idle else (1 + gm.rank()) * (x**3).sum()
    form: dict[str, Any] = {"label_smoothing": program.smoothing, "z_loss": program.z_loss}
    if program.others:
        form["smoothing_over"] = "others"
    if program.head == "tiles":
        whole = x if program.sequence is None else gm.all_gather(x, dim=program.sequence, sizes="auto")
        head: gm.nn.ColumnParallelLinear = model.head  # type: ignore[assignment]
        return gm.nn.linear_cross_entropy(
            whole,
            head.weight,
            target,
            bias=head.bias,
            src=gm.I if program.sequence is None else gm.R,
            tile=program.tile,
            **form,
        )
    logits = model.head(x)
    if program.head == "own":
        return gm.nn.vocab_parallel_cross_entropy(logits, target, **form)
    logits, flat = logits.view(-1, program.vocabulary), target.view(-1)
    kept = flat != IGNORED
    loss = cross_entropy(logits, _labels(program, flat), reduction="none")
    z = torch.where(kept, logits.logsumexp(-1) ** 2, 0)
    return (loss + program.z_loss * z).sum() / kept.sum()


def in_parts(program: Program, dense: Model) -> Model:
    """The model of this rank."""
    model = copy.deepcopy(dense)
    rows = program.sequence is not None
    # Whole logits of a sequence in parts: the head gathers its rows as the other layers do, and then its outputs.
    gm.nn.tensor_parallel(
        model,
        {
            "table": "vocab",
            "ups.*": "column",
            "downs.*": "row",
            "head": "column",
            **({"norms.*": "replicated"} if rows else {}),
        },
        sequence_dim=program.sequence,
        rows="balanced",
    )
    if program.head == "whole":
        model.head.gather_output = True  # type: ignore[assignment]
    return model


def deviation(program: Program) -> dict[str, float]:
    """On a rank: how far value, slopes and second slopes are from those of one process."""
    ranks = gm.world_size()
    dense, ids, target = model_of(program)
    right = dense_loss(program, dense, ids, target, ranks)
    names = [name for name, _ in dense.named_parameters()]
    slopes = torch.autograd.grad(
        right, list(dense.parameters()), create_graph=True, allow_unused=True, materialize_grads=True
    )
    penalty = torch.stack([(slope**2).sum() for slope in slopes]).sum()
    second = torch.autograd.grad(penalty, list(dense.parameters()), allow_unused=True, materialize_grads=True)
    model = in_parts(program, dense)
    own = list(model.parameters())
    with gm.ordered():
        loss = loss_in_parts(program, model, ids, target)
        first = gm.grad(loss, own, create_graph=True, allow_unused=True, materialize_grads=True)
        # Slopes of cut parameters are V, and each rank has its own; those of whole ones are I, and count once by
        # themselves. So one sum serves both.
        penalty = torch.stack([(slope**2).sum() for slope in first]).sum()
        twice = gm.grad(penalty, own, allow_unused=True, materialize_grads=True)
    found = {"value": float((_whole_value(program, loss.detach()) - right.detach()).abs())}
    for what, expected, got in (("slopes", slopes, first), ("second slopes", second, twice)):
        whole = _whole(model, [each.detach() for each in got])
        found[what] = max(
            float((whole[name] - each.detach()).abs().max()) / max(1.0, float(each.detach().abs().max()))
            for name, each in zip(names, expected, strict=True)
        )
    return found


def _whole_value(program: Program, loss: Tensor) -> Tensor:
    return gm.all_reduce(loss, dst=gm.R) if program.head == "rows" else loss


def _whole(model: Model, values: list[Tensor]) -> dict[str, Tensor]:
    """The values in the places of the parameters, whole, by the dense model's names."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, value in zip(other.parameters(), values, strict=True):
            parameter.copy_(value)
    return gm.nn.dense_state_dict(other)
