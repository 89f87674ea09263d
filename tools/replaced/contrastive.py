"""Libraries with contrastive losses: gathers of features, and exchanges between neighbours."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tools.replaced.cases import Case, World, all_rows, gathered, kept, rows, shifted
from tools.replaced.own_tests import Tests
from tools.replaced.repository import Repository, alone, imported
from tools.replaced.sources import Replaced, Source


def _ring(world: World) -> tuple[int, int]:
    """The ranks before and behind this one, in the world."""
    ranks = world.global_ranks
    return ranks[(world.rank - 1) % world.size], ranks[(world.rank + 1) % world.size]


def _one_way(module: Any, x: Tensor, world: World) -> Tensor:
    found: Tensor = module.neighbour_exchange_with_grad(*_ring(world), x, world.group)
    return found


def _both_ways(module: Any, x: Tensor, world: World) -> Tensor:
    return torch.cat(module.neighbour_exchange_bidir_with_grad(*_ring(world), x * 2, x * 3, world.group))


def _from_both(xs: Any, world: World) -> list[Tensor]:
    right, left = shifted(-1)(xs, world), shifted(1)(xs, world)
    return [torch.cat([2 * a, 3 * b]) for a, b in zip(right, left, strict=True)]


def _siglip(way: str) -> Any:
    def call(module: Any, x: Tensor, world: World) -> Tensor:
        loss = module.SigLipLoss(rank=world.rank, world_size=world.size, **{_argument(module): way})
        pair = [each.contiguous() for each in x.unbind(1)]
        found: Tensor = loss(*pair, torch.tensor(2.0, dtype=x.dtype), torch.tensor(-1.0, dtype=x.dtype))
        return found

    return call


def _argument(module: Any) -> str:
    return "dist_impl" if "dist_impl" in module.SigLipLoss.__init__.__code__.co_varnames else "bidir"


def _pairs(xs: Any, world: World) -> list[Tensor]:
    """The sigmoid loss of each rank: its images with the texts of all."""
    images, texts = ([x[:, n] for x in xs] for n in (0, 1))
    losses = []
    for rank, image in enumerate(images):
        terms = []
        for other, text in enumerate(texts):
            sign = 2 * torch.eye(len(image), dtype=image.dtype) * (rank == other) - 1
            terms.append(-logsigmoid(sign * (2 * image @ text.T - 1)).sum() / len(image))
        losses.append(torch.stack(terms).sum())
    return losses


_EXCHANGES = (
    Case("neighbour_exchange_with_grad", _one_way, shifted(1), rows(0, 3)),
    Case("neighbour_exchange_bidir_with_grad", _both_ways, _from_both, rows(0, 3)),
)
_GONE = (
    "neighbour_exchange",
    "neighbour_exchange_bidir",
    "NeighbourExchange",
    "neighbour_exchange_with_grad",
    "NeighbourExchangeBidir",
    "neighbour_exchange_bidir_with_grad",
)
_WORLD = "its group of ranks cannot be chosen"


def _inf_clip(root: Path) -> Any:
    losses = dict.fromkeys(("cal_flash_loss", "cal_ring_loss", "cal_inf_loss"))
    flash = dict.fromkeys(("_flash_prob_forward", "_flash_prob_backward", "_cal_flash_loss"))
    given: dict[str, Any] = {"inf_cl": losses, "inf_cl.flash": flash}
    loss = alone(root, "inf_clip/models/loss.py", "inf_clip.models.loss", **given)
    ring = alone(root, "inf_cl/ring.py", "inf_cl.ring", **given)
    exchanges = {name: getattr(loss, name) for name in _GONE[3::2]}
    return SimpleNamespace(**exchanges, GradientGather=ring.GradientGather)


CONTRASTIVE = (
    Repository(
        "lightly",
        Source(
            "lightly-ai/lightly",
            "e8d317fc5a87f4387a85a35e689869039ec249ee",
            "lightly==1.6.0",
            parts=("lightly",),
        ),
        (Replaced("lightly/utils/dist.py", "lightly.py", ("GatherLayer",)),),
        imported("lightly.utils.dist"),
        (Case("gather", lambda m, x, w: torch.cat(m.gather(x)), gathered(), rows(0, 3), group=False),),
        Tests(
            ("tests", "pyproject.toml"),
            (
                "tests/utils/test_dist.py",
                "tests/utils/test_dist__gather__losses.py",
                "-k",
                "not test_loss_dcl",
            ),
        ),
        left="`test_loss_dcl` of the commit, which does not pass with the release, is left out.",
    ),
    Repository(
        "open_clip",
        Source(
            "mlfoundations/open_clip",
            "89fb801f1e6087880e951fc8354b8a2077b79c6d",
            inside="src",
            parts=("src/open_clip",),
        ),
        (Replaced("open_clip/loss.py", "open_clip.py", _GONE),),
        lambda root: alone(root, "open_clip/loss.py", "open_clip.loss"),
        (
            *_EXCHANGES,
            Case("SigLipLoss, shift", _siglip("shift"), _pairs, rows(0, 2, 3), group=None, uneven=None),
            Case("SigLipLoss, bidir", _siglip("bidir"), _pairs, rows(0, 2, 3), group=None, uneven=None),
        ),
        Tests(("tests/test_loss.py",), ("tests/test_loss.py",)),
        left="`gather_features` stays, with its conventions; `gm.nn.clip_loss` replaces the whole loss. Their tests do "
        "not run the exchange. Between two ranks, which are both neighbours of each other, the original swaps the two "
        "messages of `neighbour_exchange_bidir_with_grad`: the subgroup above. `SigLipLoss` does not call it there.",
    ),
    Repository(
        "DisCo-CLIP",
        Source("IDEA-Research/DisCo-CLIP", "f00737dfd824baf8e16a8f726a3c9fc6e9206c8c"),
        (Replaced("disco/gather.py", "disco_clip.py"),),
        imported("disco.gather"),
        (
            Case(
                "Gather",
                lambda m, x, w: m.Gather(x),
                gathered(),
                rows(0, 3),
                factor=lambda ranks: 1 / ranks,
                group=False,
            ),
        ),
        Tests(("test/test.py",), ("test/test.py",), standins=("cuda",), variables=(("STANDIN_GPUS", "2"),)),
        left="the gradient is the mean over the ranks, as before: `gm.scale_gradient`. Its test prints "
        "gradients and asserts nothing.",
    ),
    Repository(
        "Inf-CLIP",
        Source(
            "DAMO-NLP-SG/Inf-CLIP", "d9f2833b3753ab1342db46666523c6621012fbf6", parts=("inf_cl", "inf_clip")
        ),
        (
            Replaced("inf_clip/models/loss.py", "open_clip.py", _GONE),
            Replaced("inf_cl/ring.py", "inf_clip_ring.py", ("GradientGather",)),
        ),
        _inf_clip,
        (
            *_EXCHANGES,
            Case(
                "GradientGather",
                lambda m, x, w: m.GradientGather.apply(x),
                kept,
                all_rows(0, 3),
                same=True,
                group=False,
                uneven=None,
            ),
        ),
        left="`RingProb` and `InfProb`, whose kernels need a GPU. `inf_cl` and its kernels are left out where the two "
        "files are imported. It has an example that needs GPUs, and no tests: not run.",
    ),
)
"""Those that are compared."""
