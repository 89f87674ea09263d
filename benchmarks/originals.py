"""gradmesh beside what it replaces, on Gloo, with its checks: python -m benchmarks.originals.

`losses`: CLIP, SigLIP, NT-Xent and VICReg on 3 ranks with 512 samples of 256 features each, beside those of open_clip
and lightly: pip install open_clip_torch lightly. `verbs`: collectives on 2 and 4 ranks beside the autograd Functions
that programs copy. Without a name, both.

Both sides are compared first: the mean over the ranks of an original loss is the loss of gradmesh, and its gradients
are W times those of gradmesh, which DDP divides by W; verbs have the same results and gradients. Then they take turns.
A figure is the median over the rounds of the slowest rank's forward and backward, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize

import gradmesh as gm

SIZES = {"4 KiB": 4 << 10, "256 KiB": 256 << 10, "16 MiB": 16 << 20}
SAMPLES, FEATURES, TEMPERATURE = 512, 256, 0.1
TOLERANCE = 1e-9

# torch 2.13 renamed both.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Verb = Callable[[Tensor], Tensor]
Measured = dict[tuple[str, ...], tuple[float, list[list[float]]]]
"""For each row on a rank: the difference, and the milliseconds of each round of gradmesh and of the original."""

OURS: dict[str, Loss] = {
    "clip": lambda left, right, scale, _: gm.nn.clip_loss(left, right, scale),
    "siglip": gm.nn.siglip_loss,
    "nt-xent": lambda left, right, *_: gm.nn.nt_xent_loss(
        normalize(left, dim=1), normalize(right, dim=1), TEMPERATURE
    ),
    "vicreg": lambda left, right, *_: gm.nn.vic_reg_loss(left, right),
}


def originals() -> dict[str, Loss]:
    """The losses of open_clip and lightly; NT-Xent normalizes itself."""
    try:
        from lightly.loss import NTXentLoss, VICRegLoss
        from open_clip.loss import ClipLoss, SigLipLoss
    except ImportError as error:
        raise SystemExit(f"{error}: pip install open_clip_torch lightly") from None

    place = {"rank": gm.rank(), "world_size": gm.world_size(), "cache_labels": True}
    clip: nn.Module = ClipLoss(local_loss=True, gather_with_grad=True, **place)
    nt_xent, vicreg = NTXentLoss(TEMPERATURE, gather_distributed=True), VICRegLoss(gather_distributed=True)
    return {
        "clip": lambda left, right, scale, _: clip(left, right, scale),
        "siglip": SigLipLoss(**place),
        "nt-xent": lambda left, right, *_: nt_xent(left, right),
        "vicreg": lambda left, right, *_: vicreg(left, right),
    }


def inputs(name: str, samples: int, dtype: torch.dtype) -> list[Tensor]:
    """This rank's embeddings, of unit length for CLIP and SigLIP, and the scale and bias."""
    generator = torch.Generator().manual_seed(gm.rank())
    both = torch.randn(2, samples, FEATURES, generator=generator, dtype=dtype)
    both[1] += both[0]
    if name in ("clip", "siglip"):
        both = normalize(both, dim=2)
    numbers = torch.tensor([10.0, -10.0], dtype=dtype)
    return [x.clone().requires_grad_() for x in (*both, *numbers)]


def step(loss: Loss, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The loss and the gradients of what it uses."""
    found = loss(*given)
    grads = torch.autograd.grad(found, given, allow_unused=True)
    return found.detach(), *(g for g in grads if g is not None)


def compare_losses(name: str, ours: Loss, theirs: Loss, samples: int = 32) -> float:
    """Raise if an original differs; returns the largest relative difference on this rank, in float64."""
    given, ranks = inputs(name, samples, torch.float64), gm.world_size()
    of_ours, of_theirs = step(ours, given), step(theirs, given)
    largest = 0.0
    for place, (a, b) in enumerate(zip(of_ours, of_theirs, strict=True)):
        if b.dim() == 0:  # the loss, and a rank's share of the gradient of the scale or bias
            b = gm.all_reduce(b, dst=gm.R)
            a = gm.all_reduce(a, dst=gm.R) if place else a
        largest = max(largest, _difference(name, a, b / ranks))
    return largest


def compare_verbs(name: str, ours: Verb, theirs: Verb, count: int = 48) -> float:
    """Raise if a Function has another result or gradient; returns the largest relative difference on this rank."""
    numbers = torch.Generator().manual_seed(gm.rank())
    x = torch.randn(count, dtype=torch.float64, generator=numbers).requires_grad_()
    results = ours(x), theirs(x)
    cotangent = torch.randn(results[0].shape, dtype=torch.float64, generator=numbers)
    grads = [torch.autograd.grad(y, x, cotangent)[0] for y in results]
    return max(_difference(name, *results), _difference(name, *grads))


def _difference(name: str, a: Tensor, b: Tensor) -> float:
    apart = ((a - b).abs().max() / a.abs().max()).item() if a.shape == b.shape else float("inf")
    if not apart <= TOLERANCE:
        raise AssertionError(f"{name}: gradmesh and the original differ by {apart:g}")
    return apart


def function(forward: Verb, backward: Verb) -> Verb:
    """An autograd Function, as programs write them."""

    class Function(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: forward(x))  # noqa: ARG005
        backward = staticmethod(lambda ctx, grad: backward(grad))  # noqa: ARG005

    return lambda x: Function.apply(x)  # type: ignore[no-untyped-call]


def _gather(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def _reduce(x: Tensor) -> Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


def _reduce_and_slice(grad: Tensor) -> Tensor:
    return _reduce(grad).chunk(dist.get_world_size())[dist.get_rank()]


def _scatter(x: Tensor) -> Tensor:
    out = x.new_empty(len(x) // dist.get_world_size())
    _reduce_scatter(out, x.contiguous())
    return out


def _gather_into(x: Tensor) -> Tensor:
    out = x.new_empty(len(x) * dist.get_world_size())
    _all_gather(out, x.contiguous())
    return out


def _exchange(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous())
    return out


VERBS: dict[str, tuple[Verb, Verb]] = {
    "all_gather": (gm.all_gather, function(_gather, _reduce_and_slice)),
    "all_gather, reduce_scatter in backward": (gm.all_gather, function(_gather, _scatter)),
    "reduce_scatter": (gm.reduce_scatter, function(_scatter, _gather_into)),
    "all_reduce": (partial(gm.all_reduce, dst=gm.R), function(_reduce, _reduce)),
    "all_to_all": (gm.all_to_all, function(_exchange, _exchange)),
}


def in_turn(ways: Sequence[Callable[[], object]], rounds: int, repeats: int) -> list[list[float]]:
    """Milliseconds of each way in each round."""
    taken: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):
        for times, way in list(zip(taken, ways, strict=True))[:: -1 if number % 2 else 1]:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                way()
            if number:  # the first one touches memory
                times.append(1e3 * (time.perf_counter() - begin) / repeats)
    return taken


def losses(rounds: int) -> Measured:
    """The losses on a rank."""
    torch.set_num_threads(1)
    found: Measured = {}
    for name, theirs in originals().items():
        apart = compare_losses(name, OURS[name], theirs)
        given = inputs(name, SAMPLES, torch.float32)
        ways = [partial(step, loss, given) for loss in (OURS[name], theirs)]
        found[(name,)] = apart, in_turn(ways, rounds, 3)
    return found


def _both_ways(verb: Verb, x: Tensor, cotangent: Tensor) -> None:
    torch.autograd.grad(verb(x), x, cotangent)


def verbs(rounds: int) -> Measured:
    """The verbs on a rank."""
    torch.set_num_threads(1)
    found: Measured = {}
    for name, pair in VERBS.items():
        apart = compare_verbs(name, *pair)
        for size, length in SIZES.items():
            x = torch.ones(length // 4, requires_grad=True)
            ways = [partial(_both_ways, verb, x, torch.ones_like(pair[0](x))) for verb in pair]
            repeats = 20 if length <= 4096 else 8 if length <= 1 << 18 else 1
            found[name, size] = apart, in_turn(ways, rounds, repeats)
    return found


def rows(measure: Callable[[int], Measured], ranks: int, rounds: int) -> Iterator[str]:
    """Rows of a Markdown table."""
    results = gm.launch(measure, ranks, args=(rounds,), backend="gloo")
    for key in results[0]:
        apart = max(each[key][0] for each in results)
        both = zip(*(each[key][1] for each in results), strict=True)
        ours, theirs = (statistics.median(map(max, zip(*way, strict=True))) for way in both)
        yield f"| {ranks} | {' | '.join(key)} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} | {apart:.0e} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("losses", "verbs"))
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args(arguments)
    for what, measure, names, worlds in (
        ("losses", losses, "loss", (3,)),
        ("verbs", verbs, "verb | bytes a rank", (2, 4)),
    ):
        if given.what in (what, None):
            print(f"| ranks | {names} | gradmesh | original | gradmesh : original | difference |")
            print("|---" * (6 + (what == "verbs")) + "|")
            for ranks in worlds:
                for row in rows(measure, ranks, given.rounds):
                    print(row, flush=True)
            print()


if __name__ == "__main__":
    main()
