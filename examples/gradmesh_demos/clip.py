"""Contrastive learning on ranks and on one process, with the same images in the same order, compared.

Each rank encodes its rows of the global batch and compares them with the gathered rows of all ranks, in both
directions (Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021). A rank's
loss is its rows' share of the batch's mean: losses differ between ranks and add up to the objective.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, normalize

import gradmesh as gm
from gradmesh._util.environment import require
from gradmesh.backends import shm
from gradmesh_demos.runner import (
    ALONE,
    BACKEND,
    RANKS,
    SEED,
    Watcher,
    difference,
    one_thread,
    option,
    plain,
    seeded,
    table,
    verdict,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

EXACT = 1e-10
"""The largest deviation that counts as rounding in float64."""

HELD_OUT = 297
BATCH = 150  # Not a multiple of 4, so that the ranks' shards are uneven.


PIXELS = 8 * 4
HIDDEN = 128
FEATURES = 32
RATE = 0.05
MOMENTUM = 0.9
LARGEST_SCALE = 100.0
"""Bound on the inverse temperature, as in CLIP."""

Views = tuple[Tensor, Tensor]


class Towers(nn.Module):
    """An encoder for each view, and the learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left = _encoder()
        self.right = _encoder()
        self.log_scale = nn.Parameter(torch.tensor(10.0, dtype=torch.float64).log())

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The normalized embeddings of both views, and the inverse temperature."""
        return normalize(self.left(left), dim=1), normalize(self.right(right), dim=1), self.log_scale.exp()


def _encoder() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(PIXELS, HIDDEN, dtype=torch.float64),
        nn.GELU(),
        nn.Linear(HIDDEN, FEATURES, dtype=torch.float64),
    )


def _gather(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return gm.all_gather(x, sizes=sizes)


# Like torch.distributed.all_gather: the same values, without a gradient.
@torch.no_grad()
def _gather_without_gradient(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return gm.all_gather(x, sizes=sizes)


def _gather_slice_only(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return gm.all_gather(x, dst=gm.I, sizes=sizes)


GATHERS: dict[str, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "gradmesh": _gather,
    "no gradient": _gather_without_gradient,
    "slice only": _gather_slice_only,
}
"""Three all-gathers with the same values. The second has no backward; the backward of the third returns this rank's
slice of its gradient, which is correct only if every rank has the same loss."""


def rank_loss(gather: str, model: Towers, views: Views, batch: Tensor) -> Tensor:
    """This rank's share of the loss of a global batch."""
    indices = torch.arange(len(batch))
    sizes = [len(rows) for rows in indices.tensor_split(gm.axis().size)]
    local = gm.shard(indices, sizes=sizes)
    left, right, scale = functional_call(
        model, _replicated(model), tuple(view[batch[local]] for view in views)
    )
    # One message for both views.
    all_left, all_right = GATHERS[gather](torch.stack([left, right], dim=1), sizes).unbind(dim=1)
    to_right = cross_entropy(scale * left @ all_right.T, local, reduction="sum")
    to_left = cross_entropy(scale * right @ all_left.T, local, reduction="sum")
    return (to_right + to_left) / (2 * len(batch))


def _replicated(model: nn.Module) -> dict[str, Tensor]:
    """The parameters for use on local rows: backward sums their gradients over the ranks, in one message."""
    parameters = dict(model.named_parameters())
    joined = gm.replicate(torch.cat([parameter.flatten() for parameter in parameters.values()]))
    pieces = joined.split([parameter.numel() for parameter in parameters.values()])
    return {
        name: piece.view_as(parameter)
        for (name, parameter), piece in zip(parameters.items(), pieces, strict=True)
    }


def dense_loss(model: Towers, views: Views, batch: Tensor) -> Tensor:
    """The loss of a global batch on one process, without gradmesh."""
    left, right, scale = model(*(view[batch] for view in views))
    similarity = scale * left @ right.T
    matches = torch.arange(len(batch))
    return (cross_entropy(similarity, matches) + cross_entropy(similarity.T, matches)) / 2


@dataclass
class Learner:
    """A model, trained by SGD with momentum. Adam would hide a gradient that is wrong by a factor."""

    model: Towers
    velocity: list[Tensor]

    @classmethod
    def new(cls, seed: int) -> Learner:
        """Draw the initial parameters."""
        with seeded(seed):
            model = Towers()
        return cls(model, [torch.zeros_like(parameter) for parameter in model.parameters()])

    def train(self, loss_of: Callable[[Towers, Tensor], Tensor], batches: Sequence[Tensor]) -> list[float]:
        """Take a step for each batch, and return the losses."""
        losses = []
        for batch in batches:
            loss = loss_of(self.model, batch)
            self._step(torch.autograd.grad(loss, list(self.model.parameters())))
            losses.append(loss.item())
        return losses

    @torch.no_grad()
    def _step(self, gradient: Sequence[Tensor]) -> None:
        for parameter, velocity, grad in zip(self.model.parameters(), self.velocity, gradient, strict=True):
            velocity.mul_(MOMENTUM).add_(grad)
            parameter.sub_(RATE * velocity)
        self.model.log_scale.clamp_(max=math.log(LARGEST_SCALE))


# Thread ranks receive the same objects, so each works on a copy; functional_call also modifies the module temporarily.


def rank_epoch(
    gather: str, learner: Learner, views: Views, batches: Sequence[Tensor]
) -> tuple[Learner, list[float]]:
    """Train on one rank; returns the learner and this rank's losses."""
    learner = copy.deepcopy(learner)
    losses = learner.train(lambda model, batch: rank_loss(gather, model, views, batch), batches)
    return learner, losses


def rank_gradient(gather: str, model: Towers, views: Views, batch: Tensor) -> tuple[Tensor, ...]:
    """The gradient of every parameter on this rank."""
    model = copy.deepcopy(model)
    return torch.autograd.grad(rank_loss(gather, model, views, batch), list(model.parameters()))


NEEDS = "demo"
PICTURE = "demo"
SHORT = "Contrastive learning of images, with three all-gathers."
HELP = (
    "Train two encoders on the halves of handwritten digits, with a contrastive loss over the images of all ranks, and "
    "three all-gathers: gradmesh's, one without a gradient, and one whose backward takes the local slice only. Compare "
    "their gradients with those of a single process."
)


@dataclass(frozen=True)
class Job:
    """Options of the command line."""

    ranks: int = option(4, RANKS, 1)
    backend: str = option(shm.default, BACKEND)
    epochs: int = option(20, "Passes over the training images.", 1)
    seed: int = option(0, SEED, 0)


@dataclass
class Curve:
    """Per epoch, the mean loss of the training batches and the recall@1 on the held-out images."""

    loss: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)

    def extend(self, losses: Sequence[float], recall: float) -> None:
        """Add an epoch."""
        self.loss.append(sum(losses) / len(losses))
        self.recall.append(recall)


@dataclass(frozen=True)
class Images:
    """The left and right halves of the images, shuffled by the seed, one row for each image."""

    training: Views
    held_out: Views

    @classmethod
    def load(cls, seed: int) -> Images:
        """Load scikit-learn's handwritten digits (no download)."""
        from sklearn.datasets import load_digits

        images = torch.from_numpy(load_digits().images).double() / 8  # 0 to 16 becomes 0 to 2
        images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))]
        images = images - images[:-HELD_OUT].mean(dim=0)
        left, right = (half.flatten(1) for half in images.chunk(2, dim=2))
        return cls((left[:-HELD_OUT], right[:-HELD_OUT]), (left[-HELD_OUT:], right[-HELD_OUT:]))


@dataclass(frozen=True)
class Result:
    """The results of the job."""

    job: Job  # its options
    curves: dict[str, Curve]  # the training curves of each gather and of one process
    # for each gather, the largest absolute difference of any parameter's gradient on any rank from that on
    # one process; for the first batch, at the initial parameters
    grad_error: dict[str, float]
    largest_grad: float  # the largest absolute entry of the gradient on one process
    # the largest absolute difference of any parameter on any rank, after training with gradmesh's gather,
    # from training on one process
    param_error: float
    rank_error: float  # the largest absolute difference of a parameter between ranks, at the end of any epoch
    seconds: float  # run time

    def as_json(self) -> dict[str, Any]:
        """The results as plain values; `grad_error` and `recall` are those of gradmesh's gather."""
        return {
            "grad_error": self.grad_error["gradmesh"],
            "grad_error_no_gradient": self.grad_error["no gradient"],
            "grad_error_slice_only": self.grad_error["slice only"],
            "largest_grad": self.largest_grad,
            "param_error": self.param_error,
            "rank_error": self.rank_error,
            "recall": self.curves["gradmesh"].recall[-1],
            **vars(self.job),
            "seconds": round(self.seconds, 2),
            "curves": {name: vars(curve) for name, curve in self.curves.items()},
        }


def run(job: Job, watcher: Watcher | None = None) -> Result:
    """Run the job."""
    require(NEEDS, "demo")
    watcher, begin = watcher or Watcher(), time.perf_counter()
    watcher.begin("training", job.epochs * len(GATHERS))
    images = Images.load(job.seed)
    views = images.training
    order = torch.Generator().manual_seed(job.seed)
    dense = Learner.new(job.seed)
    learners = {gather: Learner.new(job.seed) for gather in GATHERS}
    curves = {name: Curve() for name in (*GATHERS, ALONE)}
    param_error = rank_error = 0.0

    def dense_loss_of(model: Towers, batch: Tensor) -> Tensor:
        return dense_loss(model, views, batch)

    with one_thread(), gm.Ranks(job.ranks, backend=job.backend) as ranks:
        grad_error, largest_grad = _grad_errors(ranks, dense.model, views)
        for epoch in range(job.epochs):
            batches = torch.randperm(len(views[0]), generator=order).split(BATCH)
            losses = dense.train(dense_loss_of, batches)
            curves[ALONE].extend(losses, recall(dense.model, images.held_out))
            for gather in GATHERS:
                learnt, shares = zip(
                    *ranks.run(rank_epoch, gather, learners[gather], views, batches), strict=True
                )
                learners[gather] = learnt[0]
                losses = [sum(parts) for parts in zip(*shares, strict=True)]
                curves[gather].extend(losses, recall(learnt[0].model, images.held_out))
                rank_error = max(rank_error, *(_deviation(one.model, learnt[0].model) for one in learnt))
                if gather == "gradmesh":
                    param_error = max(_deviation(one.model, dense.model) for one in learnt)
                watcher.advance("training", 1, f"epoch {epoch + 1} of {job.epochs}")
            _show(watcher, epoch, curves)
    seconds = time.perf_counter() - begin
    return Result(job, curves, grad_error, largest_grad, param_error, rank_error, seconds)


def recall(model: Towers, views: Views) -> float:
    """Recall@1: the share of images whose most similar other half is their own; the mean of both directions."""
    with torch.no_grad():
        left, right, _ = model(*views)
    similarity = left @ right.T
    matches = torch.arange(len(similarity))
    hits = [(similarity.argmax(dim=dim) == matches).double().mean().item() for dim in (0, 1)]
    return float(sum(hits) / 2)


def _grad_errors(ranks: gm.Ranks, model: Towers, views: Views) -> tuple[dict[str, float], float]:
    """Each gather's largest deviation from the dense gradient, and that gradient's largest entry."""
    batch = torch.arange(BATCH)
    expected = torch.autograd.grad(dense_loss(model, views, batch), list(model.parameters()))
    errors = {
        gather: max(
            difference(got, expected) for got in ranks.run(rank_gradient, gather, model, views, batch)
        )
        for gather in GATHERS
    }
    return errors, max(grad.abs().max().item() for grad in expected)


def _deviation(model: Towers, expected: Towers) -> float:
    return difference(model.parameters(), expected.parameters())


def introduction(job: Job) -> str:
    """What the demo does."""
    return (
        f"Contrastive learning of handwritten digits (left half against right half) on {job.ranks} ranks, "
        f"{job.backend} backend, batch size {BATCH}. recall@1: share of the {HELD_OUT} held-out halves whose most "
        f"similar other half is the right one (chance: {1 / HELD_OUT:.1%})."
    )


def _show(watcher: Watcher, epoch: int, curves: dict[str, Curve]) -> None:
    """Show a row for an epoch."""

    def row(first: str, *cells: str, style: str | None = None) -> None:
        watcher.line(f"{first:>5}" + "".join(f"{cell:>20}" for cell in cells), style)

    if epoch == 0:
        row("", *GATHERS)
        row("epoch", *["loss  recall@1"] * len(GATHERS), style="dim")
    row(str(epoch + 1), *(f"{curves[one].loss[-1]:.3f}  {curves[one].recall[-1]:8.1%}" for one in GATHERS))


def print_tables(result: Result, console: Console) -> None:
    """Print the gradient error of each gather, and the parameter error of gradmesh's training."""
    errors = table("gather", "max abs. difference", "relative", "gradient", left=("gather", "gradient"))
    for gather, error in result.grad_error.items():
        exact = error <= EXACT
        share = error / result.largest_grad
        judged = verdict(error, EXACT, "correct to rounding", "wrong")
        errors.add_row(gather, f"{error:.1e}", f"{share:.1e}" if exact else f"{share:.0%}", judged)
    console.print("\n[bold]Parameter gradients, compared with one process[/]", errors)
    console.print(
        f"Maximum over all parameters and ranks, for the first batch of {BATCH} images at the initial parameters; "
        f"relative to the largest entry of the gradient.\n\n"
        f"After {result.job.epochs} epochs with gradmesh, parameters differ from training on one process by at "
        f"most {result.param_error:.1e}, and between ranks by at most {result.rank_error:.1g}.\n\n"
        f"{result.seconds:.1f} s."
    )


_COLOURS = {"gradmesh": "#0072B2", "no gradient": "#E69F00", "slice only": "#D55E00"}


def draw(result: Result) -> Figure:
    """Plot the training curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    figure.suptitle(
        f"Contrastive learning on {result.job.ranks} ranks with three all-gathers\n",
        fontsize=13,
    )
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.05})
    _plot(left, {name: curve.loss for name, curve in result.curves.items()})
    left.set(title="Loss of the training batches", xlabel="epoch", ylabel="contrastive loss (nats)")
    lines, names = left.get_legend_handles_labels()
    labels = [
        f"{name}: {result.grad_error[name]:.1e}" if name in result.grad_error else name for name in names
    ]
    left.legend(lines, labels, title="all-gather: gradient error", frameon=False, alignment="left")
    _plot(right, {name: [100 * share for share in curve.recall] for name, curve in result.curves.items()})
    right.set(
        title=f"Recall@1 on {HELD_OUT} held-out images", xlabel="epoch", ylabel="other half found first (%)"
    )
    right.axhline(100 / HELD_OUT, color="grey", linewidth=1, linestyle=":")
    right.annotate("chance", (1, 100 / HELD_OUT), (0, 3), textcoords="offset points", color="grey", ha="left")
    right.set_ylim(bottom=0)
    plain(left, right)
    return figure


def _plot(axes: Axes, curves: dict[str, list[float]]) -> None:
    from matplotlib.ticker import MaxNLocator

    epochs = range(1, len(curves[ALONE]) + 1)
    for gather, colour in _COLOURS.items():
        axes.plot(epochs, curves[gather], color=colour, linewidth=2, marker=".", markersize=4, label=gather)
    # Dots: this curve coincides with gradmesh's.
    axes.plot(epochs, curves[ALONE], "o", color="black", markersize=3.5, label="one process, no gather")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
