"""Train the parallel model on ranks and the dense one on one process, and compare step by step.

A small character-level language model: dense in plain torch, and with data, sequence and tensor parallelism.
The text is Python's reference, as the standard library ships it for `help()`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import gradmesh as gm
from gradmesh_demos.runner import (
    ALONE,
    BACKEND,
    ON_RANKS,
    SEED,
    Watcher,
    draw_losses,
    one_thread,
    option,
    plain,
    some_steps,
    table,
    verdict,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

NEEDS = "demo"
PICTURE = "lm"
SHORT = "Data, sequence and tensor parallelism: a language model."
HELP = (
    "Train a character-level language model on Python's reference, with data, sequence and tensor parallelism, and "
    "compare with one process, step by step."
)
EXACT = 1e-10
"""The largest deviation that counts as rounding in float64."""


@dataclass(frozen=True)
class Job:
    """Options of the command line."""

    dp: int = option(2, "Data parallel size.", 1)
    sp: int = option(2, "Sequence parallel size.", 1)
    tp: int = option(2, "Tensor parallel size.", 1)
    backend: str = option("threads", BACKEND)
    steps: int = option(60, "Number of training steps.", 1)
    seed: int = option(0, SEED, 0)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.dp * self.sp * self.tp


@dataclass(frozen=True)
class Settings:
    """Hyperparameters; the model is in float64, so that rounding errors stay small."""

    width: int = 32  # hidden size
    heads: int = 4  # number of attention heads
    blocks: int = 2  # number of transformer blocks
    context: int = 64  # sequence length in characters
    batch: int = 16  # sequences per step, over all ranks
    steps: int = 30  # number of training steps
    lr: float = 3e-3  # learning rate of AdamW
    seed: int = 0  # of the initial parameters and the batches


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.features = features
        self.attend: Callable[..., Tensor] = partial(scaled_dot_product_attention, is_causal=True)
        self.norm, self.again = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, (batch, positions, width)."""
        y = self.norm(x)
        # This rank's heads; all heads in a dense model.
        heads = [
            each(y).unflatten(-1, (-1, self.features)).transpose(1, 2) for each in (self.q, self.k, self.v)
        ]
        x = x + self.out(self.attend(*heads).transpose(1, 2).flatten(2))
        z: Tensor = self.down(gelu(self.up(self.again(x))))
        return x + z


class CharModel(nn.Module):
    """A decoder with tied embedding and output layer."""

    def __init__(self, words: int, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.table, self.places = nn.Embedding(words, width), nn.Embedding(settings.context, width)
        self.blocks = nn.ModuleList(Block(width, width // settings.heads) for _ in range(settings.blocks))
        self.norm = nn.LayerNorm(width)
        self.loss: Callable[..., Tensor] = dense_loss

    def forward(self, ids: Tensor, target: Tensor, places: Tensor) -> Tensor:
        """The mean loss of the next characters; all arguments have shape (batch, positions)."""
        x = self.table(ids) + self.places(places)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.loss(self.norm(x), self.table.weight, target)
        return loss


def dense_model(words: int, settings: Settings) -> CharModel:
    """The model before training, the same on every rank."""
    model, draw = CharModel(words, settings).double(), torch.Generator().manual_seed(settings.seed)
    for name, value in model.named_parameters():
        if value.dim() > 1:
            nn.init.normal_(value, std=value.shape[-1] ** -0.5, generator=draw)
        elif name.endswith("bias"):
            nn.init.zeros_(value)
    return model


def dense_loss(x: Tensor, table: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of all logits."""
    return cross_entropy((x @ table.T).flatten(0, 1), target.flatten())


def in_parts(dense: CharModel) -> nn.Module:
    """This rank's model on a mesh with the axes dp, sp and tp; its loss is that of the local tokens."""
    model: Any = copy.deepcopy(dense)
    styles: dict[str, Any] = {
        "table": "vocab",
        "*.[qkv]": "column",
        "*.out": "row",
        "*.up": "column",
        "*.down": "row",
    }
    gm.nn.tensor_parallel(model, styles, "tp")
    for block in model.blocks:
        block.attend = partial(gm.nn.ring_attention, axis="sp", causal=True, order="zigzag")
    model.loss = partial(gm.nn.linear_cross_entropy, axis="tp", sizes=model.table.cuts["weight"].sizes)
    # Along dp and sp, every rank has different tokens: sum the gradients.
    return gm.nn.Replicated(gm.nn.Replicated(model, "sp"), "dp")


def words_of() -> tuple[str, Tensor]:
    """The vocabulary, and the text as ids."""
    from pydoc_data.topics import topics  # large

    text = "".join(topics[name] for name in sorted(topics))
    words = "".join(sorted(set(text)))
    number = {word: at for at, word in enumerate(words)}
    return words, torch.tensor([number[word] for word in text])


def batch_of(text: Tensor, settings: Settings, step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: characters, and the next characters."""
    draw = torch.Generator().manual_seed(settings.seed + 1000 + step)
    begins = torch.randint(len(text) - settings.context, (settings.batch, 1), generator=draw)
    rows = begins + torch.arange(settings.context + 1)
    return text[rows[:, :-1]], text[rows[:, 1:]]


def train(model: nn.Module, text: Tensor, settings: Settings, *, parts: bool) -> Iterator[float]:
    """Train a model; yields the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), settings.lr)
    places = torch.arange(settings.context)
    if parts:
        places = gm.nn.sequence.positions(settings.context, "sp", order="zigzag")
    for step in range(settings.steps):
        ids, target = batch_of(text, settings, step)
        if parts:  # local sequences and positions
            ids, target = (gm.shard(each, "dp")[:, places] for each in (ids, target))
        loss = model(ids, target, places)
        if parts:  # mean over all tokens
            loss = gm.objective(gm.objective(loss, "sp"), "dp")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


@dataclass(frozen=True)
class Result:
    """The results of the job."""

    job: Job  # its options
    losses: list[float]  # of each step, on ranks
    right: list[float]  # of each step, on one process
    apart: float  # the largest absolute difference of a parameter after training
    words: int  # the size of the vocabulary
    numbers: tuple[int, int]  # the number of parameters, and the largest number on a rank
    seconds: dict[str, float]  # run time of each run

    @property
    def far(self) -> list[float]:
        """The absolute difference of the losses, step by step."""
        return [abs(a - b) for a, b in zip(self.losses, self.right, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """The results as plain values."""
        return {**asdict(self), "far": max(self.far)}


def follow(
    settings: Settings, dp: int, sp: int, tp: int, watcher: Watcher | None = None
) -> tuple[list[float], dict[str, Any], int]:
    """On each rank: the losses, the dense state after training, and the number of local parameters."""
    first, losses = gm.rank() == 0, list[float]()
    words, text = words_of()
    gm.mesh(dp=dp, sp=sp, tp=tp)
    model = in_parts(dense_model(len(words), settings))
    for loss in train(model, text, settings, parts=True):
        losses.append(loss)
        if first and watcher is not None:
            watcher.advance(ON_RANKS)
    return losses, gm.nn.dense_state_dict(model), sum(each.numel() for each in model.parameters())


def run(job: Job, watcher: Watcher | None = None) -> Result:
    """Run the job; the progress of process ranks is reported at their end."""
    watcher = watcher or Watcher()
    for name in (ON_RANKS, ALONE):
        watcher.begin(name, job.steps)
    settings = Settings(steps=job.steps, seed=job.seed)
    words, text = words_of()
    dense = dense_model(len(words), settings)
    with one_thread():
        started = time.perf_counter()
        local = watcher if job.backend == "threads" else None
        found = gm.launch(
            follow, job.ranks, backend=job.backend, args=(settings, job.dp, job.sp, job.tp, local)
        )
        if local is None:
            watcher.advance(ON_RANKS, job.steps)
        between, right = time.perf_counter(), list[float]()
        for loss in train(dense, text, settings, parts=False):
            right.append(loss)
            watcher.advance(ALONE)
        over = time.perf_counter()
    losses, whole, _ = found[0]
    state = dense.state_dict()
    return Result(
        job,
        losses,
        right,
        max(float((whole[name] - state[name]).abs().max()) for name in state),
        len(words),
        (sum(each.numel() for each in dense.parameters()), max(own for _, _, own in found)),
        {ON_RANKS: between - started, ALONE: over - between},
    )


def introduction(job: Job) -> str:
    """What the demo does."""
    kind = {"threads": "thread ", "shm": "process ", "gloo": "process "}.get(job.backend, "")
    return (
        f"Character-level language model of Python's reference on {job.ranks} {kind}ranks: "
        f"data parallel {job.dp} x sequence parallel {job.sp} x tensor parallel {job.tp}."
    )


def print_tables(result: Result, console: Console) -> None:
    """Print the losses of both runs and their differences."""
    losses = table("step", ON_RANKS, ALONE, "abs. difference")
    for step in some_steps(len(result.losses)):
        values = (result.losses[step], result.right[step])
        losses.add_row(str(step + 1), *(f"{value:.6f}" for value in values), f"{result.far[step]:.1e}")
    console.print(losses)
    worst = max(*result.far, result.apart)
    judged = verdict(worst, EXACT, "equal to rounding", "different")
    console.print(
        f"max abs. difference: losses {max(result.far):.1e}, final parameters {result.apart:.1e}: {judged}. "
        f"{result.numbers[1]} of {result.numbers[0]} parameters on each rank."
    )


def draw(result: Result) -> Figure:
    """Plot both runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    losses, far = figure.subplots(1, 2)
    draw_losses(losses, far, result)
    losses.set(title="Loss per character", xlabel="step", ylabel="nats")
    plain(losses, far)
    return figure
