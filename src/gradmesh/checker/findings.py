"""What a check returns: findings with their places, and notes on what could not be followed."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradmesh.errors import ArgumentError

Severity = Literal["error", "warning"]
"""An error is a wrong number, or no answer; a warning is what goes wrong in some uses and is meant in others."""


@dataclass(frozen=True)
class Rule:
    """One kind of finding."""

    id: str  # as findings, pages and SARIF files spell it
    name: str  # the same in words
    severity: Severity  # "error" or "warning"
    short: str  # what is wrong, as a sentence
    why: str  # how it comes about and what it does to the training, as one or more sentences
    remedy: str  # what to change

    @property
    def page(self) -> str:
        """The rule's page, as a path in the repository."""
        return f"docs/rules/{self.id}.md"

    def as_json(self) -> dict[str, Any]:
        """The rule as values that JSON has."""
        return {**asdict(self), "page": self.page}


_ALL = (
    Rule(
        "GM101",
        "missing-sum",
        "error",
        "A parameter that is the same on the ranks gets each rank's own part of its gradient; the sum is missing.",
        "The parameter enters each rank's part of the objective, so its gradient is the sum of the ranks' parts. "
        "Without the sum every rank steps along its own part: the copies differ after the first step, and no copy is "
        "the model that was meant. The usual places are a norm's weight under sequence parallelism, whose ranks see "
        "different tokens, an expert's bias, a router, and a module beside the one that DDP wraps. Shards of a larger "
        "parameter that every rank draws from one seed look the same: seed the ranks apart.",
        "Sum the gradient over these ranks before the optimizer step, dist.all_reduce(p.grad) or a hook that does "
        "it, or let the parameter enter through an operation whose backward is that sum.",
    ),
    Rule(
        "GM102",
        "sum-too-many",
        "error",
        "A parameter's gradient is W times too large beside those of the other parameters.",
        "W is the number of ranks of the group. Either the gradient was summed over the ranks once more than its "
        "path asks for, or a loss that is the same on the ranks was followed back on each of them through a sum, "
        "which counts its seed W times. Adam hides the factor and weight decay, clipping and the learning rate of "
        "SGD do not: these parameters train at another rate than the rest.",
        "Take one of the two sums away: the gradient of what is the same on the ranks, reached by one repeated "
        "loss, is not summed again. Where the loss is multiplied by the ranks for the others, divide this one by them.",
    ),
    Rule(
        "GM103",
        "part-of-the-gradient",
        "error",
        "A parameter gets a part of its gradient: contributions were cut off on the way, or averaged away.",
        "What the optimizer is handed is not proportional to the gradient of the objective, or is a fraction of it "
        "beside the others. Either a path from the parameter to the loss carries no gradient back: detach, no_grad, "
        ".data or .item() around a collective, a backward that keeps only this rank's slice, a collective that "
        "autograd does not record. Or the ranks hold parts of one gradient, and their mean was taken where the sum was "
        "meant.",
        "Let the cut value pass through a differentiable collective, and sum parts of one gradient; where a cut is "
        "meant, cut on every rank and on every path alike.",
    ),
    Rule(
        "GM104",
        "wrong-backward",
        "error",
        "The backward of a hand-written Function is not the adjoint of its forward under any convention.",
        "Over the ranks a collective is a linear map, and its backward has to be the transpose of that map, whether "
        "the ranks' losses are added up or are one loss that each rank repeats. This one is neither: a factor too "
        "many or too few, a slice of another rank, a sum taken after the slice instead of before, or a mean where "
        "forward takes a sum. All that stands before it trains on a wrong gradient.",
        "Make backward the transpose of forward: a gather's is the sum of the ranks' gradients, then this rank's "
        "slice; a sum's is the sum where the ranks diverge, and the identity where they repeat one loss.",
    ),
    Rule(
        "GM105",
        "wrong-convention",
        "error",
        "The backward of a hand-written Function is right under one convention and is used under the other.",
        "Where every rank does identical work and repeats one loss, the incoming gradient is the same on all ranks, "
        "and backward takes this rank's slice of it (or passes it on). Where the ranks diverge, each contributes a "
        "part, and backward has to sum the parts first. The Function does one of the two while the program does the "
        "other, so gradients miss the other ranks' parts or are W times too large.",
        "Use the other backward here: sum first, then slice, where the ranks' losses or inputs differ behind it; "
        "slice alone where they are the same.",
    ),
    Rule(
        "GM106",
        "hidden-collective",
        "error",
        "A collective without a backward works on a tensor that autograd follows, so the gradient does not pass.",
        "The calls of torch.distributed, such as all_reduce and all_gather, fill memory behind autograd's back. "
        "The graph still holds what was there before: a reduced tensor passes its gradient as if it had not been "
        "reduced, and gathered buffers pass none. Nothing raises, and the loss is right.",
        "Call a collective that is differentiable, such as gradmesh's, or the raw one inside an autograd Function with "
        "the right backward; for a value that is only shown, hand it x.detach().clone().",
    ),
    Rule(
        "GM107",
        "overwritten-save",
        "error",
        "A collective wrote in place into a tensor that autograd had saved for backward.",
        "An operation before it keeps this tensor to compute its derivative from, and finds the other ranks' values "
        "in it. Where torch counts the write, backward raises; where the collective writes through .data, detach() "
        "or another view of the memory, the write is not counted, and the derivative is taken at the wrong point.",
        "Reduce a copy: x.clone() before a collective that works in place.",
    ),
    Rule(
        "GM108",
        "counted-many-times",
        "error",
        "A value that is the same on the ranks is added to a partial sum before the sum over the ranks.",
        "Each rank holds a part of a sum that is completed by a collective. What is added to each part, mostly the "
        "bias of a layer that is split along its input, arrives W times: forward is not the layer that was meant, "
        "its loss depends on the number of ranks, and so does the gradient of the value.",
        "Add it once, after the collective; or on one rank alone; or divide it by the number of ranks.",
    ),
    Rule(
        "GM109",
        "divided-twice",
        "error",
        "The loss is divided by the count over all ranks, and the gradient is averaged over the ranks again.",
        "A loss that each rank divides by the global number of tokens or samples, or by W, adds up over the ranks to "
        "the mean that was meant: its gradients belong summed. DDP, FSDP and a hand-written mean divide by the number "
        "of ranks once more, so that the step is W times too short, and more so the more ranks there are.",
        "Divide once: multiply the loss by the number of ranks where the wrapper takes the mean, or let the wrapper "
        "take the sum, or divide by this rank's count if all ranks have the same count.",
    ),
    Rule(
        "GM110",
        "term-repeated",
        "warning",
        "A term of the loss that is the same on the ranks counts once for each rank, and the others count once.",
        "Gradients are summed over the ranks, and the terms that depend on a rank's data are divided by a count over "
        "all ranks, so that their sum is a mean over all data. A term that every rank computes alike, such as a "
        "penalty on the parameters, is added up as well: it counts as many times as there are ranks, and its weight "
        "changes with their number.",
        "Divide the term by the number of ranks, or add it on one rank alone.",
    ),
    Rule(
        "GM111",
        "mean-of-means",
        "warning",
        "Ranks or micro-batches average over different numbers of entries, and their averages count alike.",
        "An average of the gradients of means over n_r entries weighs an entry with 1/n_r, whatever rank or "
        "micro-batch it is in: those of a short batch count more than those of a long one, and the result depends on "
        "how the data is split. One process with all entries, which takes one mean, gets another gradient. It happens "
        "with sequences of different lengths, masks, ignored labels and the last batch of an epoch.",
        "Divide the sum of a rank's or micro-batch's losses by the number of entries on all ranks and in all "
        "micro-batches of the step, times the number of ranks where gradients are averaged: "
        "gm.objective(loss, weights=n, ddp=model). If each rank or micro-batch is to count alike, leave it.",
    ),
    Rule(
        "GM112",
        "reported-sum",
        "warning",
        "A number that is summed over the ranks is printed, and one process would print it once, or the mean.",
        "Ranks that have the same data, as those of tensor parallelism, count the same tokens and have the same loss: "
        "the sum over them is as many times what one process gives. Where each rank's loss is the mean over its own "
        "data, their sum is the mean over all data times the number of ranks. Gradients are not affected, but curves, "
        "early stopping and comparisons between runs are.",
        "Divide the sum by the number of ranks, or sum over the group of the ranks with different data.",
    ),
    Rule(
        "GM201",
        "values-drift",
        "error",
        "A parameter is the same on the ranks before an optimizer step and is not after it.",
        "Its gradients were the same, and the step made something else of them on each rank: learning rates, "
        "schedules, clipping, weight decay, the optimizer's state or a random number differ. From there on the ranks "
        "average gradients of different models, and what one rank saves is not what the others trained.",
        "Compute what the step depends on from values that are the same on every rank: reduce them first, or "
        "broadcast rank 0's.",
    ),
    Rule(
        "GM202",
        "never-same",
        "error",
        "A parameter whose gradients are summed over the ranks differs between them from the start.",
        "The sum of gradients makes steps the same, not values: copies that begin apart stay apart, and each rank "
        "follows gradients that were taken at the other ranks' points. It comes from seeds that depend on the rank "
        "before the model is built, and rank 0's values are not broadcast.",
        "Broadcast the parameters from one rank after the model is built, or seed alike until it is built and apart "
        "afterwards.",
    ),
    Rule(
        "GM203",
        "statistics-differ",
        "warning",
        "A buffer of the model differs between ranks that hold the same parameters.",
        "Running statistics of batch norm follow each rank's own batches. Training does not read them; "
        "evaluation does, so that the ranks evaluate different models and a checkpoint holds the statistics of one "
        "of them.",
        "Use torch.nn.SyncBatchNorm, or average or broadcast the buffers before evaluation and before saving.",
    ),
    Rule(
        "GM204",
        "tied-apart",
        "error",
        "A parameter that ranks share as copies gets a different gradient on each copy.",
        "The copies are one parameter, such as an embedding on the first stage of a pipeline that is the head on the "
        "last. Its gradient is the sum over the places where it is used, on whichever rank these are. Copies that "
        "step along their own place's part are two parameters after one step.",
        "Sum the copies' gradients over the ranks that hold one before the optimizer step.",
    ),
    Rule(
        "GM205",
        "clipped-alone",
        "error",
        "Gradients are scaled by a norm that is not the whole model's, or that differs from rank to rank.",
        "The norm leaves out shards or experts of other ranks, or counts what ranks have copies of several times. "
        "Where it is over this rank's gradients only, each rank scales by another factor. The parts of a sharded "
        "gradient then point in a direction that is not the gradient's, and copies of a replicated "
        "parameter diverge. Where ranks clip their own gradients, by norm or by value, before these are averaged, "
        "the average is not the gradient of the objective.",
        "Call gm.nn.clip_grad_norm_, which takes the norm of the whole model; or sum the squared norms of the shards "
        "over their group, count what is replicated once, and scale by the norm of all of it on every rank. Clip after "
        "gradients are averaged.",
    ),
    Rule(
        "GM206",
        "settings-differ",
        "warning",
        "An optimizer's settings differ between ranks that step copies of one parameter.",
        "The copies get the same gradient, but the learning rate, the weight decay, the betas or another setting of "
        "the optimizer is not the same, or a ReduceLROnPlateau is given a value that is not the same. The copies move "
        "apart, at first by less than rounding hides, and the ranks then average gradients of different models.",
        "Build the optimizer from the same settings on every rank, and give schedulers a value that is the same on "
        "every rank, such as the loss averaged with dist.all_reduce.",
    ),
    Rule(
        "GM207",
        "step-of-a-shard",
        "warning",
        "An optimizer's step mixes the entries of a shard, without those of the other ranks.",
        "The update of an entry depends on other entries, through a norm or a matrix product, as in LARS, LAMB, Muon, "
        "Shampoo or L-BFGS. On a shard it depends on this rank's entries alone, as no collective runs in the step: the "
        "update is not that of the whole parameter, and it changes with the number of ranks.",
        "Sum squared norms over the ranks that hold the parameter; gather a matrix before it is factored, or give each "
        "rank whole matrices. Where the step of each shard by itself is meant, nothing has to change.",
    ),
    Rule(
        "GM208",
        "mode-differs",
        "warning",
        "A layer is in training on some ranks and in evaluation on others, while their gradients are brought together.",
        "Dropout and batch norm compute something else in evaluation. Mostly one rank evaluates or saves the model, "
        "and does not call train() afterwards.",
        "Call model.train() on every rank after evaluation, or evaluate a copy.",
    ),
    Rule(
        "GM209",
        "values-not-averaged",
        "warning",
        "Ranks that step by themselves bring their parameters together, but not as an average of all of them.",
        "Each rank takes steps of its own, and the ranks then bring their parameters together. A sum that is not "
        "divided is as many times too large as there are ranks. Parameters that are left out stay different, beside "
        "averaged ones that were trained for other values of them.",
        "Average all of model.parameters(), and its buffers: sum over the ranks and divide by their number. Where each "
        "rank keeps layers of its own on purpose, nothing has to change.",
    ),
    Rule(
        "GM301",
        "same-data",
        "warning",
        "Every rank works on the same batch while gradients are averaged over the ranks.",
        "Averaging equal gradients returns what one rank has already: the run costs W times as much and learns "
        "as from one W-th of the batch that was meant. It comes from a loader without a DistributedSampler, or from "
        "the same seed for the same random crops.",
        "Give each rank its own part: a DistributedSampler with set_epoch, or a seed that the rank enters.",
    ),
    Rule(
        "GM302",
        "mask-differs",
        "error",
        "A random mask differs between ranks on an activation that is the same on them.",
        "Under tensor parallelism these ranks hold copies of one activation and have to drop the same elements of it. "
        "With masks of their own the copies are copies no longer, while everything behind them, collectives and "
        "their backward, goes on as if they were.",
        "Draw it from a generator that is seeded alike within the group, or draw it on one rank and broadcast it.",
    ),
    Rule(
        "GM303",
        "mask-alike",
        "warning",
        "The same random mask falls on different shards of one activation.",
        "The ranks hold different parts of one activation and draw from generators in the same state, so that the "
        "elements at the same place of each part are dropped together. The masks of the whole are not independent, "
        "which is another regularisation than the one that was asked for.",
        "Draw it from a generator whose seed the rank in the group enters.",
    ),
    Rule(
        "GM304",
        "shares-of-data",
        "warning",
        "The ranks' shares of a data set overlap, or are the same in every epoch.",
        "Each rank's DistributedSampler takes every W-th sample of a shuffled order, which depends on a seed and on "
        "the epoch. Where ranks have another seed, another epoch or another subset, the shares overlap: in one "
        "epoch some samples are read several times and others never. Where set_epoch is not called, every epoch has "
        "the same batches in the same order, and each rank sees its own share alone.",
        "Call sampler.set_epoch(epoch) on every rank at the beginning of each epoch, with one seed; split the data set "
        "with a generator of one seed.",
    ),
    Rule(
        "GM305",
        "wrong-annotation",
        "warning",
        "A tensor's values or gradients are not what spmd_types.assert_type says of it.",
        "Of R and I tensors every rank has the same value, of I and P ones the same gradient. A type checker takes an "
        "annotation for granted: it accepts a missing sum behind one that is wrong, or one sum too many.",
        "Annotate what it is: V where values differ, P where they are the terms of a sum, R where each rank uses the "
        "value in its own way. Or make it what is said, with the collective that is missing.",
    ),
    Rule(
        "GM401",
        "calls-differ",
        "error",
        "Ranks make different collective calls.",
        "A collective pairs the calls of all ranks of its group in the order in which each makes them. Where the "
        "order, the kind, the shape or the root differs, a call waits for one that does not come, or is paired with "
        "another that happens to fit and returns its values. Mostly a condition that differs over the ranks stands "
        "around the call, or a loop runs more often on one rank.",
        "Make the same calls in the same order on every rank of the group: take the condition from a value that all "
        "share, or let ranks without work take part with an empty or zero tensor. Where ranks skip a module under FSDP "
        "or DDP: loss + gm.nn.skipped(module, example).",
    ),
    Rule(
        "GM402",
        "stuck",
        "error",
        "Ranks wait, and nothing happens any more.",
        "Each rank that has not returned stands in a call that needs another rank, and none moved for as long as "
        "--timeout says. Sends that wait for each other in a circle do it, a receive whose send is missing, a rank "
        "that left a loop early, and a backward that one rank does not run.",
        "Follow the places at which the ranks stand: the rank that stands elsewhere, or has returned, has to "
        "make the missing call. A rank that skips a module under FSDP or DDP: loss + gm.nn.skipped(module, example).",
    ),
    Rule(
        "GM403",
        "not-waited",
        "error",
        "The result of an asynchronous call is used before the call is waited for.",
        "The tensor has its old values, new ones or some of each, depending on how fast the other ranks and the "
        "network are. Where gradients are summed so, ranks step along different gradients.",
        "Keep what the call returns, and call wait() on it before the tensor is used.",
    ),
    Rule(
        "GM501",
        "script-failed",
        "error",
        "The script raised on a rank.",
        "What was recorded before is judged; what would have come after is not known.",
        "Run the script under torchrun and fix what it raises; if it runs there, give what it needs after `--`.",
    ),
)

RULES: dict[str, Rule] = {rule.id: rule for rule in _ALL}
"""Every rule by its id, in the order of the ids."""


Status = Literal["complete", "stopped", "not-run"]
"""All steps ran; the script raised, hung or ended before; nothing could be recorded, so that nothing is known."""


@dataclass(frozen=True)
class Place:
    """A line of the user's program."""

    file: str  # the path, as the user would open it
    line: int  # the line, from 1
    function: str  # the function around it, with the classes around that; "<module>" at the top
    text: str  # the line's source, stripped; empty where it is not known

    def as_json(self) -> dict[str, Any]:
        """The place as values that JSON has."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with the program."""

    rule: Rule  # which kind of thing
    message: str  # what was seen here, as a sentence
    at: Place | None  # where it goes wrong; None where no line of the program is
    began: Place | None  # where it began, if that is another line
    ranks: tuple[int, ...]  # the global ranks that it was seen on; empty where that is unknown
    # what it was seen on: a parameter's name, a Function's, a group's; empty if there is none
    subject: str = ""
    remedy: str = ""  # how to fix it; the rule's where none is given
    # whether a number of the program is taken for that of the ranks, which more ranks have to show
    by_number: bool = False
    # where the wrong gradient is received, if `at` is the operator that it first differs at
    received: Place | None = None
    # the optimizer step, from 1, whose gradients or values show it; None if it is not of one step
    step: int | None = None

    def __post_init__(self) -> None:
        if not self.remedy:
            object.__setattr__(self, "remedy", self.rule.remedy)

    @property
    def severity(self) -> Severity:
        """How bad it is: "error" or "warning"."""
        return self.rule.severity

    def as_json(self) -> dict[str, Any]:
        """The finding as values that JSON has."""
        return {
            "rule": self.rule.id,
            "name": self.rule.name,
            "severity": self.severity,
            "message": self.message,
            "at": self.at and self.at.as_json(),
            "began": self.began and self.began.as_json(),
            "received": self.received and self.received.as_json(),
            "ranks": list(self.ranks),
            "subject": self.subject,
            "remedy": self.remedy,
            "step": self.step,
        }


@dataclass(frozen=True)
class Redistribution:
    """DTensor redistributed the operand of an operator, and the program does not say so."""

    at: Place | None  # the line
    operator: str  # the operator, and whether that of a backward
    # before, after: the placements
    before: str
    after: str
    size: int  # bytes of the whole tensor
    times: int  # how often, on the rank that did it most often


@dataclass(frozen=True)
class Verdict:
    """What a check found."""

    findings: tuple[Finding, ...]  # what is wrong
    notes: tuple[str, ...]  # what could not be followed, as sentences
    ranks: int  # on how many ranks the script ran
    steps: int  # how many optimizer steps were seen
    # how long the script ran under the checker, "checked", and the comparison took, "judged"
    seconds: dict[str, float] = field(default_factory=dict)
    status: Status = "complete"  # whether all of it ran
    # how many of the steps were followed, so that their gradients were checked; None where it was not counted
    followed: int | None = None
    memory: int = 0  # the most bytes that the ranks and the comparison held together, as far as it is known
    redistributions: tuple[Redistribution, ...] = ()  # of DTensors, which the program does not ask for

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are errors."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that are warnings."""
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    @property
    def ok(self) -> bool:
        """Whether all of it ran, and there is no error."""
        return self.status == "complete" and not self.errors

    def as_json(self) -> dict[str, Any]:
        """The verdict as values that JSON has."""
        return {
            "status": self.status,
            "ok": self.ok,
            "ranks": self.ranks,
            "steps": self.steps,
            "followed": self.followed,
            "seconds": {name: round(taken, 3) for name, taken in self.seconds.items()},
            "memory": self.memory,
            "findings": [finding.as_json() for finding in self.findings],
            "notes": list(self.notes),
            "redistributions": [asdict(each) for each in self.redistributions],
        }


def root(folder: Path | None = None) -> Path:
    """The nearest folder upward that is under version control, from which files are named; else the folder itself."""
    folder = (folder or Path.cwd()).resolve()
    return next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)


def relative(file: str, base: Path) -> str:
    """A file as it is called from a folder; of an installed package, from where packages are installed.

    >>> relative("/home/me/model/train.py", Path("/home/me/model"))
    'train.py'
    >>> relative("/usr/lib/python3/site-packages/megatron/layers.py", Path("/home/me/model"))
    'megatron/layers.py'
    """
    path = Path(file)
    if "site-packages" in path.parts:
        last = len(path.parts) - path.parts[::-1].index("site-packages")
        return Path(*path.parts[last:]).as_posix()
    path = Path(os.path.abspath(path))
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()


def place_of(finding: Finding) -> Place:
    """Where a finding is shown: where it goes wrong, else where it began, else nowhere."""
    return finding.at or finding.began or Place("", 0, "", "")


def fingerprint(finding: Finding, base: Path | None = None) -> str:
    """What stays when lines move: rule, file, function, source text without its spaces, and subject.

    Files are named from `base`; from `root()` if there is none.
    """
    place = place_of(finding)
    file = relative(place.file, base or root()) if place.file else ""
    parts = (finding.rule.id, file, place.function, " ".join(place.text.split()), finding.subject)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def numbered(findings: Iterable[Finding], base: Path) -> list[tuple[Finding, str, int]]:
    """Each finding with its fingerprint, and a number from 1 that tells those of one fingerprint apart."""
    seen: Counter[str] = Counter()
    found = []
    for finding in findings:
        print_ = fingerprint(finding, base)
        seen[print_] += 1
        found.append((finding, print_, seen[print_]))
    return found


_VERSION = 1


@dataclass(frozen=True)
class Known:
    """A finding of a baseline."""

    fingerprint: str  # what it is known by
    rule: str  # the rule's id
    where: str  # file and function, for people
    subject: str  # what it was seen on

    def __str__(self) -> str:
        return f"{self.rule} {self.where}" + (f" ({self.subject})" if self.subject else "")


@dataclass(frozen=True)
class Sorted:
    """Findings beside a baseline."""

    new: tuple[Finding, ...]  # those that it does not have
    hidden: tuple[Finding, ...]  # those that it has
    gone: tuple[Known, ...]  # what it has and no longer occurs


def write(path: Path, findings: Sequence[Finding], base: Path | None = None) -> None:
    """Write what is found as a baseline, one finding a line, so that a change of it can be read."""
    known = sorted((_known(finding, base or root()) for finding in findings), key=str)
    lines = ",\n".join("  " + json.dumps(vars(each)) for each in known)
    path.write_text(f'{{"version": {_VERSION}, "findings": [\n{lines}\n]}}\n')


def read(path: Path) -> tuple[Known, ...]:
    """The findings of a baseline.

    Raises:
        ArgumentError: the file is none.
    """
    try:
        data: Any = json.loads(path.read_text())
        if data["version"] != _VERSION:
            raise ValueError(f"version {data['version']}")
        return tuple(Known(**each) for each in data["findings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError.of(
            f"{path} is not a readable baseline",
            op="check",
            expected=f"a file of --write-baseline, version {_VERSION}",
            got=f"{type(error).__name__}: {error}",
            remedy=f"write it with --write-baseline {path}",
        ) from error


def beside(findings: Sequence[Finding], known: Sequence[Known], base: Path | None = None) -> Sorted:
    """What is new, what is known, and what is gone. A fingerprint hides as many findings as the baseline has of it."""
    base = base or root()
    left = Counter(each.fingerprint for each in known)
    new: list[Finding] = []
    hidden: list[Finding] = []
    for finding in findings:
        key = fingerprint(finding, base)
        (hidden if left[key] > 0 else new).append(finding)
        left[key] -= 1
    gone = []
    for each in reversed(known):
        if left[each.fingerprint] > 0:
            left[each.fingerprint] -= 1
            gone.append(each)
    return Sorted(tuple(new), tuple(hidden), tuple(reversed(gone)))


def _known(finding: Finding, base: Path) -> Known:
    place = place_of(finding)
    where = f"{relative(place.file, base)}:{place.function}" if place.file else "nowhere"
    return Known(fingerprint(finding, base), finding.rule.id, where, finding.subject)
