"""What gradmesh promises about its speed, and what came out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from benchmarks.speed.contenders import FLOOR_NAME, named
from benchmarks.speed.overhead import overheads
from benchmarks.speed.results import Key, Results
from benchmarks.speed.tasks import SIZES, WAYS, said
from benchmarks.systems.ours import GRADMESH
from benchmarks.systems.peers import DTENSOR, FUNCTIONAL, NN, SPMD_TYPES

__all__ = ["OURS", "PEERS", "RAW_SHM", "Target", "against_peers", "targets"]

OURS = named(GRADMESH.name, "shm")
RAW_SHM = named("torch.distributed", "shm")
PEERS = tuple(named(peer.name, "gloo") for peer in (NN, FUNCTIONAL, SPMD_TYPES, DTENSOR))
"""What differentiates, on the backend that torch has for CPUs."""

_LARGE = 512 * 2**10
_FASTER = {"all_gather": 10.0, "reduce_scatter": 10.0, "all_to_all": 10.0, "all_reduce": 5.0}
_FASTER_IN_EVERY_CELL = {"all_gather": 3.0}


@dataclass(frozen=True)
class Target:
    """A promise.

    Attributes:
        promise: in words.
        figure: what came out, in words.
        met: whether it was kept; None if what it takes was not measured.
    """

    promise: str
    figure: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """Met, missed or not measured."""
        return "not measured" if self.met is None else "met" if self.met else "missed"


def targets(results: Results) -> list[Target]:
    """All promises, in their order."""
    found: list[Target] = []
    for ranks in results.ranks:
        for verb, times in _FASTER.items():
            found += _against_peers(results, ranks, verb, times)
        found.append(_against_mpi(results, ranks))
        found += [_against_floor(results, ranks, name) for name in (RAW_SHM, OURS)]
        found += [_overhead(results, ranks, way) for way in WAYS]
    return found


def against_peers(results: Results, key: Key) -> tuple[float, str] | None:
    """How many times as fast as the fastest peer gradmesh is on shm, and which peer that is."""
    ratios = [(ratio, peer) for peer in PEERS if (ratio := results.ratio(key, peer, OURS)) is not None]
    return min(ratios) if ratios else None


def _against_peers(results: Results, ranks: int, verb: str, times: float) -> list[Target]:
    keys = list(results.keys(ranks=[ranks], verbs=[verb]))
    ratios = [(against[0], key) for key in keys if (against := against_peers(results, key)) is not None]
    what = f"{verb} on shm, {ranks} ranks, against the fastest peer on gloo"
    mean = f"{what}: at least {times:g} times as fast, geometric mean"
    each = _FASTER_IN_EVERY_CELL.get(verb)
    if not ratios:
        return [Target(mean, "", None)]
    total = geometric_mean(ratio for ratio, _ in ratios)
    found = [Target(mean, f"{total:.1f} times, over {len(ratios)} cells", total >= times)]
    if each is not None:
        least, key = min(ratios)
        figure = f"{least:.1f} times at worst: {key.way}, {said(key.size)}"
        found.insert(
            0, Target(f"{what}: at least {each:g} times as fast in every cell", figure, least >= each)
        )
    return found


def _against_mpi(results: Results, ranks: int) -> Target:
    promise = f"raw shm, {ranks} ranks, against MPICH from {said(_LARGE)} up: not slower, geometric mean"
    sizes = [size for size in results.sizes if size >= _LARGE]
    ratios = _ratios(results, results.keys(ranks=[ranks], sizes=sizes), RAW_SHM, "MPI")
    if not ratios:
        return Target(promise, "", None)
    mean = geometric_mean(ratio for ratio, _ in ratios)
    return Target(promise, f"{mean:.2f} times its time, over {len(ratios)} cells", mean <= 1)


def _against_floor(results: Results, ranks: int, name: str) -> Target:
    promise = f"{name}, {ranks} ranks, against the floor at {said(SIZES[-1])}: within 2 times"
    ratios = _ratios(results, results.keys(ranks=[ranks], sizes=SIZES[-1:]), name, FLOOR_NAME)
    if not ratios:
        return Target(promise, "", None)
    worst, key = max(ratios)
    mean = geometric_mean(ratio for ratio, _ in ratios)
    figure = f"{worst:.2f} times at worst ({key.verb} {key.way}), {mean:.2f} in geometric mean"
    return Target(promise, figure, worst <= 2)


def _overhead(results: Results, ranks: int, way: str) -> Target:
    """The mean over the verbs that both wrappers have."""
    promise = (
        f"what the verb adds to the raw call, {way}, {ranks} ranks: not above functional collectives (shm)"
    )
    added: dict[str, dict[str, float]] = {GRADMESH.name: {}, FUNCTIONAL.name: {}}
    for each in overheads(results):
        if each.backend == "shm" and (each.key.ranks, each.key.way) == (ranks, way):
            added[each.wrapper][each.key.verb] = 1e6 * each.seconds
    ours, theirs = added.values()
    common = ours.keys() & theirs.keys()
    if not common:
        return Target(promise, "", None)
    mine, other = (fmean(verbs[verb] for verb in common) for verbs in (ours, theirs))
    figure = f"{mine:.1f} us against {other:.1f} us, mean over {len(common)} verbs"
    return Target(promise, figure, mine <= other)


def _ratios(results: Results, keys: Iterable[Key], name: str, other: str) -> Sequence[tuple[float, Key]]:
    return [(ratio, key) for key in keys if (ratio := results.ratio(key, name, other)) is not None]
