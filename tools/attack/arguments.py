"""What a verb is called with: sizes, roots, pairs and parts, for every rank of every group."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tools.attack.calls import PerRank
from tools.attack.programs import Program

Shapes = list[tuple[int, ...]]
"""Each rank's shape of a variable."""


class Arguments:
    """Draws what the verbs of a program are called with."""

    def __init__(self, program: Program, rng: random.Random) -> None:
        self.program, self.rng = program, rng

    def chance(self, p: float) -> bool:
        """Whether something happens."""
        return self.rng.random() < p

    def parts(self, whole: int, count: int) -> tuple[int, ...]:
        """Sizes, zero among them, that add up to a whole."""
        cuts = sorted(self.rng.randint(0, whole) for _ in range(count - 1))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, whole], strict=True))

    def sizes_on_ranks(self, shapes: Shapes, dim: int, axis: str) -> PerRank:
        """The sizes along dim on the ranks of each rank's group."""
        found = {}
        for group in self.program.groups(axis):
            for rank in group:
                found[rank] = tuple(shapes[other][dim] for other in group)
        return PerRank(tuple(found[rank] for rank in range(self.program.ranks)))

    def sizes(self, shapes: Shapes, dim: int, axis: str) -> dict[str, Any]:
        """A `sizes` argument for a dim: every size or "auto"; often none if the sizes are equal."""
        explicit = self.sizes_on_ranks(shapes, dim, axis)
        even = all(len(set(one)) == 1 for one in explicit.values)
        if even and self.chance(0.6):
            return {}
        return {"sizes": self.rng.choice([explicit, "auto"])}

    def by_group(self, axis: str, made: Callable[[tuple[int, ...]], dict[int, Any]]) -> PerRank:
        """A value for each rank, made group by group."""
        found: dict[int, Any] = {}
        for group in self.program.groups(axis):
            found.update(made(group))
        return PerRank(tuple(found[rank] for rank in range(self.program.ranks)))

    def params(self, verb: str, shapes: Shapes, axis: str, dim: int) -> dict[str, Any]:
        """What a verb is called with."""
        rng, ranks = self.rng, len(self.program.groups(axis)[0])
        if verb == "all_gather":
            return {"dim": dim, "dst": rng.choice("RRRI"), **self.sizes(shapes, dim, axis)}
        if verb == "all_reduce":
            op = rng.choice(("sum", "sum", "sum", "mean", "max", "min", "prod", "logsumexp"))
            return {"op": op, "dst": rng.choice("RRRI")}
        if verb == "all_to_all":
            return self.all_to_all(shapes, axis, dim)
        if verb == "broadcast":
            return {"root": rng.randrange(ranks), "dst": rng.choice("RRI")}
        if verb == "convert":
            src, dst = rng.choice(("RP", "RI", "IP", "VP", "RV"))
            return {"src": src, "dst": dst}
        if verb in ("scan", "exscan"):
            return {"reverse": self.chance(0.4)}
        if verb == "reduce":
            return {"root": rng.randrange(ranks)}
        if verb == "gather":
            return {"dim": dim, "root": rng.randrange(ranks), **self.sizes(shapes, dim, axis)}
        if verb == "halo_exchange":
            return {
                "dim": dim,
                "halo": (rng.randrange(3), rng.randrange(3)),
                "wrap": self.chance(0.5),
                **self.sizes(shapes, dim, axis),
            }
        if verb == "shift":
            return {
                "offset": rng.choice((1, 1, -1, 2)),
                "wrap": self.chance(0.7),
                **self.moved(shapes, axis, dim),
            }
        if verb == "permute":
            sources, targets = (rng.sample(range(ranks), ranks) for _ in range(2))
            count = rng.randint(1, ranks)
            pairs = list(zip(sources[:count], targets[:count], strict=True))
            return {"pairs": pairs, **self.moved(shapes, axis, dim)}
        if verb == "neighbor_all_to_all":
            return self.neighbors(shapes, axis)
        if verb == "exchange":
            return {"parts": PerRank(tuple(self.parts(shape[dim], ranks) for shape in shapes)), "dim": dim}
        if verb == "messages":
            return self.messages(shapes, axis)
        if verb in ("reduce_scatter", "shard"):
            given: dict[str, Any] = {"dim": dim}
            given |= {"src": rng.choice("RI")} if verb == "shard" else {"op": rng.choice(("sum", "mean"))}
            if self.chance(0.5):
                given["sizes"] = self.by_group(
                    axis, lambda g: dict.fromkeys(g, self.parts(shapes[g[0]][dim], len(g)))
                )
            return given
        return {}

    def moved(self, shapes: Shapes, axis: str, dim: int) -> dict[str, Any]:
        """The arguments of `shift` and `permute` that depend on sizes."""
        sizes = self.sizes(shapes, dim, axis)
        return {"dim": dim, **sizes} if sizes else {}

    def all_to_all(self, shapes: Shapes, axis: str, dim: int) -> dict[str, Any]:
        """What is cut and joined, along one dim or along two."""
        if len(shapes[0]) == 1 or self.chance(0.5):  # the same dim: any sizes
            send = [self.parts(shape[dim], len(self.program.groups(axis)[0])) for shape in shapes]

            def received(group: tuple[int, ...]) -> dict[int, Any]:
                return {r: tuple(send[s][place] for s in group) for place, r in enumerate(group)}

            return {
                "split_dim": dim,
                "concat_dim": dim,
                "split_sizes": PerRank(tuple(send)),
                "concat_sizes": self.by_group(axis, received),
            }
        given: dict[str, Any] = {"split_dim": dim, "concat_dim": 1 - dim}
        if self.chance(0.6):
            given["split_sizes"] = self.by_group(
                axis, lambda g: dict.fromkeys(g, self.parts(shapes[g[0]][dim], len(g)))
            )
            given["concat_sizes"] = self.sizes_on_ranks(shapes, 1 - dim, axis)
        return given

    def messages(self, shapes: Shapes, axis: str) -> dict[str, Any]:
        """A few messages from rank to rank, also several from one to another."""
        everyone = range(self.program.ranks)
        sends: dict[int, list[int]] = {rank: [] for rank in everyone}
        receives: dict[int, list[Any]] = {rank: [] for rank in everyone}
        for group in self.program.groups(axis):
            for _ in range(self.rng.randint(1, 3)):
                source, to = self.rng.sample(range(len(group)), 2)
                sends[group[source]].append(to)
                receives[group[to]].append((source, shapes[group[source]]))
        return {
            "sends": PerRank(tuple(tuple(sends[rank]) for rank in everyone)),
            "receives": PerRank(tuple(tuple(receives[rank]) for rank in everyone)),
        }

    def neighbors(self, shapes: Shapes, axis: str) -> dict[str, Any]:
        """Rows for some of the ranks."""
        rows: dict[int, dict[int, tuple[int, ...]]] = {}
        counts: dict[int, dict[int, int]] = {rank: {} for rank in range(self.program.ranks)}
        for group in self.program.groups(axis):
            for place, rank in enumerate(group):
                rows[rank] = {}
                for to, target in enumerate(group):
                    if shapes[rank][0] and self.chance(0.6):
                        picked = tuple(
                            self.rng.randrange(shapes[rank][0]) for _ in range(self.rng.randint(0, 3))
                        )
                        rows[rank][to] = picked
                        counts[target][place] = len(picked)
        ranks = range(self.program.ranks)
        return {
            "send_rows": PerRank(tuple(tuple(sorted(rows[rank].items())) for rank in ranks)),
            "receive_counts": PerRank(tuple(tuple(sorted(counts[rank].items())) for rank in ranks)),
        }
