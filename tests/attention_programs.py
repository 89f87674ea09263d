"""Random programs with attention over a cut sequence, and the same on one process: what the attention tests compare."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.sequence import Order, sizes_of, spans

Lengths = tuple[int, ...] | tuple[tuple[int, ...], ...] | None

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class Program:
    """What one program does.

    Attributes:
        seed: of the values.
        by: "ring" or "heads".
        sizes: of the ranks' parts.
        queries: of the ranks' parts of the queries, in cross attention; None: queries and keys are of one sequence.
        batch: how many sequences.
        heads: of queries.
        groups: heads of keys.
        features: of queries and keys, and of values.
        causal: whether a place sees only places up to itself.
        order: how the sequence lies on the ranks.
        lengths: of documents.
        dtype: of everything.
        layers: how often it attends; with two, the queries of the second are what the first saw.
        orders: of derivatives that are compared.
        ordered: whether it runs in `gm.ordered()`.
        idle: a rank whose loss uses no result; -1: none.
        frozen: a rank on which no tensor requires grad; -1: none.
    """

    seed: int = 0
    by: str = "ring"
    sizes: tuple[int, ...] = (3, 3)
    batch: int = 1
    heads: int = 2
    groups: int = 2
    features: tuple[int, int] = (4, 4)
    causal: bool = False
    order: Order = "plain"
    lengths: Lengths = None
    dtype: torch.dtype = torch.float64
    layers: int = 1
    orders: int = 2
    ordered: bool = False
    idle: int = -1
    frozen: int = -1
    queries: tuple[int, ...] | None = None

    @property
    def whole(self) -> list[Tensor]:
        """Queries, keys and values of all ranks."""
        generator = torch.Generator().manual_seed(self.seed)
        length, (d, e) = sum(self.sizes), self.features
        rows = length if self.queries is None else sum(self.queries)
        shapes = (self.heads, rows, d), (self.groups, length, d), (self.groups, length, e)
        drawn = [
            torch.randn(self.batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes
        ]
        return [x.to(self.dtype) for x in drawn]

    def part(self, x: Tensor, rank: int, *, queries: bool = False) -> Tensor:
        """A rank's part, of queries and of what they see or of keys and values."""
        if queries and self.queries is not None:
            return x.split(self.queries, 2)[rank]
        held = spans(self.order, self.sizes)[rank]
        return torch.cat([x[:, :, start:stop] for start, stop in held], 2)


def random_program(seed: int, ranks: int) -> Program:
    """A program drawn from a seed."""
    draw = random.Random(seed)
    order: Order = draw.choice(["plain", "zigzag"])
    length = draw.choice([0, 1, 2 * ranks, 7, 12, 19])
    sizes = sizes_of(order, length, ranks)
    if order == "plain" and draw.random() < 0.5:
        cuts = sorted(draw.randrange(length + 1) for _ in range(ranks - 1))
        sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))
    groups = draw.choice([1, 2, 3])
    heads = groups * draw.choice([1, 2, 3])
    batch = draw.choice([1, 2])
    ordered = draw.random() < 0.5
    frozen = draw.choice([-1, -1, draw.randrange(ranks)]) if ranks > 1 else -1
    features = draw.choice([(4, 4), (3, 5), (1, 2)])
    dtype = draw.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
    # What is rounded to 8 bits tells nothing of what is made of its derivative.
    narrow = dtype is torch.bfloat16
    layers = 1 if narrow or features[0] != features[1] else draw.choice([1, 2])
    lone = draw.randrange(ranks)
    by, causal = draw.choice(["ring", "ring", "heads"]), draw.random() < 0.6
    lengths = _lengths(draw, length, batch)
    other = random.Random(-1 - seed)
    queries = None
    if not causal and lengths is None and length and other.random() < 0.7:
        queries = tuple(other.choice([0, 1, 3, 6]) for _ in range(ranks))
    return Program(
        seed,
        by,
        sizes,
        batch,
        heads,
        groups,
        features,
        causal=causal,
        order=order,
        lengths=lengths,
        queries=queries,
        dtype=dtype,
        layers=layers,
        # Outside of ordered(), second order would leave out a rank on which no input requires grad.
        orders=1 if narrow or (frozen >= 0 and not ordered) else draw.choice([1, 2]),
        ordered=ordered,
        idle=draw.choice([-1, lone]) if ordered and ranks > 1 else -1,
        frozen=frozen,
    )


def _lengths(draw: random.Random, length: int, batch: int) -> Lengths:
    kind = draw.choice(["none", "none", "one", "each"])
    if kind == "none" or not length:
        return None
    if kind == "one":
        return _cut(draw, length)
    return tuple(_cut(draw, draw.randrange(length + 1)) for _ in range(batch))


def _cut(draw: random.Random, length: int) -> tuple[int, ...]:
    cuts = sorted({draw.randrange(length + 1) for _ in range(draw.randrange(4))})
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))


def attend_on_ranks(program: Program, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    verb: Any = gm.nn.ring_attention
    if program.by == "heads":
        verb = gm.nn.ulysses_attention
        if program.queries is not None:
            query_sizes: Any = program.queries if program.seed % 3 else "auto"
            verb = partial(verb, query_sizes=query_sizes)
    for _ in range(program.layers):
        q = verb(
            q,
            k,
            v,
            causal=program.causal,
            order=program.order,
            sizes=program.sizes if program.seed % 2 else "auto",
            lengths=program.lengths,
        )
    return q


def attend_densely(program: Program, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with all scores at once, and a mask; a row that sees nothing gives 0."""
    length = k.shape[2]
    seen = torch.ones(program.batch, q.shape[2], length, dtype=torch.bool)
    if program.lengths is not None:
        nested = program.lengths and isinstance(program.lengths[0], tuple)
        for one in range(program.batch):
            listed: Any = program.lengths[one] if nested else program.lengths
            document = torch.full((length,), -1)
            numbers = torch.repeat_interleave(
                torch.arange(len(listed)), torch.tensor(listed, dtype=torch.int64)
            )
            document[: len(numbers)] = numbers
            seen[one] = (document[:, None] == document) & (document[:, None] >= 0)
    if program.causal:
        seen = seen.tril()
    k, v = (x.repeat_interleave(program.heads // program.groups, 1) for x in (k, v))
    for _ in range(program.layers):
        scores = (q @ k.mT * program.features[0] ** -0.5).masked_fill(~seen[:, None], -torch.inf)
        none = ~seen.any(-1)[:, None, :, None]
        q = scores.masked_fill(none, 0).softmax(-1).masked_fill(none, 0) @ v
    return q


def _loss(program: Program, out: Tensor, rank: int) -> Tensor:
    return ((1 + rank) * out.double()).sin().sum()


def _second(gradients: list[Tensor], rank: int) -> Tensor:
    return torch.stack(
        [(g.double() * (2 + rank + number)).sin().sum() for number, g in enumerate(gradients)]
    ).sum()


def on_rank(program: Program) -> list[Tensor | None]:
    """What the rank's queries see, and the gradients by its queries, keys and values: of its loss, and of these."""
    rank = gm.rank()
    leaves = [program.part(x, rank, queries=not n).clone() for n, x in enumerate(program.whole)]
    for leaf in leaves:
        leaf.requires_grad_(rank != program.frozen)
    if not program.ordered:
        out = attend_on_ranks(program, *leaves)
        loss = _loss(program, out, rank)
        if program.orders == 1:
            loss.backward()
            return [out.detach(), *(leaf.grad for leaf in leaves)]
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(_second(list(first), rank), leaves)
        return [out.detach(), *(g.detach() for g in first), *second]
    with gm.ordered():
        out = attend_on_ranks(program, *leaves)
        used = None if rank == program.idle else _loss(program, out, rank)
        if program.orders == 1:
            gm.backward(used)
            return [out.detach(), *(leaf.grad for leaf in leaves)]
        if rank == program.frozen:
            gm.grad(used, torch.zeros((), requires_grad=True), create_graph=True, allow_unused=True)
            gm.backward(None)
            return [out.detach(), *(None,) * 6]
        first = gm.grad(used, leaves, create_graph=True)
        gm.backward(_second(list(first), rank))
    return [out.detach(), *(g.detach() for g in first), *(leaf.grad for leaf in leaves)]


def densely(program: Program) -> list[list[Tensor | None]]:
    """The same on one process, in double precision, cut as the ranks have it."""
    leaves = [x.double().requires_grad_() for x in program.whole]
    ranks = range(len(program.sizes))
    out = attend_densely(program, *leaves)
    used = [
        _loss(program, program.part(out, rank, queries=True), rank) for rank in ranks if rank != program.idle
    ]
    found = list(torch.autograd.grad(sum(used, 0 * out.sum()), leaves, create_graph=True))
    results = [out, *found]
    if program.orders > 1:
        # A rank that is frozen has no gradients to go on with.
        terms = [
            _second([program.part(g, rank, queries=not n) for n, g in enumerate(found)], rank)
            for rank in ranks
            if rank != program.frozen
        ]
        nothing = torch.stack([0 * g.sum() for g in found]).sum()
        results += torch.autograd.grad(sum(terms, nothing), leaves)
    parts: list[list[Tensor | None]] = []
    for rank in ranks:
        # What the queries see, and the gradients by the queries; the others are by keys and values.
        mine: list[Tensor | None] = [
            program.part(x.detach(), rank, queries=n in (0, 1, 4)) for n, x in enumerate(results)
        ]
        if rank == program.frozen:
            mine[1:] = [None] * (len(mine) - 1)
        parts.append(mine)
    return parts


def compare(program: Program, found: list[list[Tensor | None]]) -> None:
    """Hold what the ranks found against one process, relative to the largest entry of all ranks."""
    expected = densely(program)
    for number in range(len(expected[0])):
        sizes = [float(x.abs().max()) for part in expected if (x := part[number]) is not None and x.numel()]
        limit = TOLERANCE[program.dtype] * max([1.0, *sizes])
        for rank, (mine, right) in enumerate(zip(found, expected, strict=True)):
            got, wanted = mine[number], right[number]
            where = f"{program}: result {number} on rank {rank}"
            if got is None or wanted is None:
                assert got is None or not got.any(), where
                assert wanted is None or not wanted.any(), where
                continue
            assert got.shape == wanted.shape, where
            assert got.dtype is program.dtype, where
            assert not got.numel() or float((got - wanted).abs().max()) <= limit, where
