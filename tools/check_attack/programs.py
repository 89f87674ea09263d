"""Random programs: what is drawn for each, and what may go with what."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from tools.check_attack.functions import CALLS, STYLES
from tools.check_attack.pieces import PIECES

MESHES = ((2, 1), (2, 1), (4, 1), (1, 2), (1, 2), (1, 4), (2, 2), (2, 2))
LOSSES = ("mean", "count", "masked", "sum", "scaled_up", "shared", "reduced")
AVERAGED = frozenset({"mean", "scaled_up", "reduced"})
"""Losses whose gradients are averaged over the data-parallel ranks; those of the others are summed."""
SYNCS = (
    "each",
    "flat",
    "avg",
    "root",
    "async",
    "gather",
    "zero",
    "hooks",
    "late_hooks",
    "ddp",
    "fsdp2",
    "asked",
    "zero1",
    "zero2",
    "master",
)
SHARDED = frozenset({"zero1", "zero2", "master"})
"""Each rank's optimizer has a part of the model, whose new values are sent to all: whole parameters, or a flat copy."""
_BESIDE_SHARDS = frozenset({"log", "eval", "aux", "broadcast", "uneven"})
OPTIMIZERS = ("sgd", "momentum", "adamw", "manual", "manual_data")
EXTRAS = (
    "scale",
    "log",
    "ema",
    "eval",
    "unused",
    "frozen",
    "first_rank",
    "aux",
    "twice",
    "broadcast",
    "uneven",
    "device_mesh",
    "late_division",
    "scaler",
    "clip_value",
)


@dataclass(frozen=True)
class Placed:
    """A piece in a model."""

    piece: str  # its name
    layout: str  # "whole" on all tensor-parallel ranks, or cut along the "tokens"
    ways: tuple[int, ...] = (0, 0, 0, 0, 0, 0)  # for each operation over ranks, which of the ways to call it
    again: bool = False  # whether it is the module of the last piece of this kind once more


@dataclass(frozen=True)
class Program:
    """A training script, before it is printed."""

    seed: int  # of its parameters and data. dp, tp: how many ranks each axis of the mesh has
    dp: int = 2
    tp: int = 1
    # "lookup", "linear", or "cut" (over the tensor-parallel ranks). begins, ends: the layout at the embedding
    # and at the head
    embedding: str = "linear"
    begins: str = "whole"
    ends: str = "whole"
    pieces: tuple[Placed, ...] = ()  # between the two
    tied: bool = False  # whether the head is the embedding
    loss: str = "mean"  # how the number is formed that backward begins at
    micro: int = 1  # how many backwards a step has
    sync: str = "each"  # how gradients come together
    clip: bool = False  # whether they are clipped
    optimizer: str = "sgd"  # of the step
    style: str = "plain"  # of the helpers of hand-written Functions
    extras: frozenset[str] = frozenset()  # what else it does

    @property
    def ranks(self) -> int:
        """How many processes it runs on."""
        return self.dp * self.tp

    @property
    def random(self) -> bool:
        """Whether it draws what a single process would not."""
        return any(PIECES[placed.piece].random for placed in self.pieces)

    @property
    def deliberate(self) -> bool:
        """Whether some of its gradients are on purpose no derivatives."""
        return any(PIECES[placed.piece].deliberate for placed in self.pieces)

    def has(self, extra: str) -> bool:
        """Whether it does this too."""
        return extra in self.extras


def draw(seed: int) -> Program:
    """A program that is right."""
    dice = random.Random(seed)
    while True:
        program = _drawn(dice, seed)
        if is_sound(program):
            return program


def _drawn(dice: random.Random, seed: int) -> Program:
    dp, tp = dice.choice(MESHES)
    layouts = ["whole", "tokens"] if tp > 1 else ["whole"]
    begins = at = dice.choice(layouts)
    placed: list[Placed] = []
    for _ in range(dice.randint(1, 4)):
        if dice.random() < 0.35:
            at = dice.choice(layouts)
        fitting = [
            p for p in PIECES.values() if at in p.layouts and (not p.axis or _size(p.axis, dp, tp) > 1)
        ]
        # What talks to other ranks is what this is about.
        talking = [p for p in fitting if p.axis]
        piece = dice.choice(talking if talking and dice.random() < 0.5 else fitting)
        ways = tuple(dice.randrange(len(ways)) for ways in CALLS.values())
        earlier = any(p.piece == piece.name and p.layout == at for p in placed)
        placed.append(Placed(piece.name, at, ways, earlier and dice.random() < 0.5))
    program = Program(
        seed,
        dp,
        tp,
        dice.choice(["lookup", "linear", "cut"]),
        begins,
        dice.choice([at, *layouts]),
        tuple(placed),
        dice.random() < 0.3,
        dice.choice(LOSSES),
        dice.choice([1, 1, 1, 2]),
        dice.choice(SYNCS),
        dice.random() < 0.25,
        dice.choice(OPTIMIZERS),
        dice.choice(STYLES),
        frozenset(extra for extra in EXTRAS if dice.random() < 0.15),
    )
    if program.sync not in SHARDED:
        return program
    # Little goes together with these: what does not is left out, or they would hardly ever be drawn.
    extras = program.extras & _BESIDE_SHARDS
    return dataclasses.replace(program, optimizer="sgd", clip=False, tied=False, micro=1, extras=extras)


def _size(axis: str, dp: int, tp: int) -> int:
    return dp if axis == "dp" else tp


def is_sound(program: Program) -> bool:
    """Whether what was drawn goes together."""
    p, has = program, program.has
    names = [placed.piece for placed in p.pieces]
    experts = "Experts" in names
    averaged = p.loss in AVERAGED
    tokens = p.ends == "tokens" or p.begins == "tokens" or any(x.layout == "tokens" for x in p.pieces)
    for at, placed in enumerate(p.pieces):
        if placed.again and not any(
            x.piece == placed.piece and x.layout == placed.layout for x in p.pieces[:at]
        ):
            return False
        axis = PIECES[placed.piece].axis
        if (
            (axis and _size(axis, p.dp, p.tp) == 1)
            or placed.layout not in PIECES[placed.piece].layouts
            or (placed.layout == "tokens" and p.tp == 1)
        ):
            return False
    rules = (
        p.tp > 1 or (p.begins == p.ends == "whole"),
        p.embedding != "cut" or (p.tp > 1 and p.begins == "whole" and not p.tied),
        not p.tied or (p.embedding == "lookup" and p.begins == p.ends),
        p.loss not in ("shared", "reduced", "scaled_up") or p.dp > 1,
        p.loss not in ("shared", "reduced") or p.ends == "whole",
        # Rows of other ranks count in a local result: only what is one whole over all ranks is the same on one.
        p.micro == 1 or all(PIECES[name].local for name in names),
        not has("uneven") or (p.dp > 1 and p.loss in ("count", "masked", "sum", "scaled_up", "reduced")),
        not has("uneven") or (not experts and p.micro == 1),
        p.dp > 1 or p.sync in ("each", "asked"),
        p.sync not in SHARDED or (p.tp == 1 and p.micro == 1 and p.optimizer == "sgd" and not p.clip),
        p.sync not in SHARDED or not (experts or p.random or p.tied),
        p.sync not in SHARDED or p.extras.issubset(_BESIDE_SHARDS),
        p.sync not in ("ddp", "fsdp2") or (averaged and not experts),
        p.sync != "fsdp2" or (p.tp == 1 and p.micro == 1 and p.optimizer in ("sgd", "adamw")),
        p.sync != "fsdp2" or not p.extras.intersection({"ema", "unused", "frozen", "broadcast", "twice"}),
        p.sync != "ddp" or not p.extras.intersection({"twice", "unused", "scale"}),
        p.sync != "ddp" or "ReentrantMlp" not in names,
        p.sync != "ddp" or not any(placed.again for placed in p.pieces) or "CheckpointedMlp" not in names,
        p.sync not in ("hooks", "late_hooks", "asked") or not p.extras.intersection({"unused", "frozen"}),
        p.sync not in ("late_hooks", "asked") or (p.micro == 1 and not has("twice")),
        p.sync != "asked" or "ReentrantMlp" not in names,
        not has("twice") or (has("aux") and "ReentrantMlp" not in names),
        not has("first_rank") or (p.dp > 1 and not averaged and p.ends == "whole" and p.loss != "shared"),
        not has("first_rank") or p.sync in ("each", "flat", "async", "zero"),
        not has("broadcast") or (p.tp == 1 and not experts and p.sync != "ddp"),
        not has("device_mesh") or (p.tp > 1 and p.dp > 1),
        not has("late_division")
        or (p.micro > 1 and averaged and p.sync in ("each", "flat", "async", "gather")),
        not has("frozen") or (not experts and len(names) > 0 and not p.pieces[0].again),
        "Dropped" not in names or not tokens,
        "Dropped" not in names or not p.extras.intersection({"eval", "uneven", "frozen"}),
        not p.random or not (p.deliberate or has("clip_value")),
        not has("scaler") or not (has("scale") or p.optimizer.startswith("manual")),
        not has("scaler") or (p.sync not in ("hooks", "late_hooks", "asked", "fsdp2") and not has("unused")),
        not has("clip_value") or (p.sync != "fsdp2" and not p.optimizer.startswith("manual")),
        not has("eval") or "GlobalBatchNorm" not in names,
    )
    return all(rules)


def simpler(program: Program) -> list[Program]:
    """Programs with a little less, each still right."""
    p = program
    found: list[Program] = []

    def with_(**changes: object) -> None:
        found.append(dataclasses.replace(p, **changes))  # type: ignore[arg-type]

    for at in range(len(p.pieces)):
        with_(pieces=p.pieces[:at] + p.pieces[at + 1 :])
    for extra in sorted(p.extras):
        with_(extras=p.extras - {extra})
    if p.clip:
        with_(clip=False)
    if p.tied:
        with_(tied=False)
    if p.micro > 1:
        with_(micro=1, extras=p.extras - {"late_division"})
    plain = {"sync": "each", "optimizer": "sgd", "style": "plain", "embedding": "linear"}
    for name, value in plain.items():
        if getattr(p, name) != value:
            with_(**{name: value})
    for loss in ("mean", "count"):
        if p.loss not in ("mean", loss):
            with_(loss=loss)
    for at, placed in enumerate(p.pieces):
        if any(placed.ways):
            less = dataclasses.replace(placed, ways=(0,) * len(placed.ways))
            with_(pieces=(*p.pieces[:at], less, *p.pieces[at + 1 :]))
    if p.dp > 2:
        with_(dp=2)
    if p.tp > 2:
        with_(tp=2)
    if p.dp > 1 and p.tp > 1:
        with_(dp=1, extras=p.extras - {"device_mesh"})
    if p.begins != p.ends:
        with_(begins="whole", ends="whole")
    return [each for each in found if is_sound(each)]
