"""The experiments of an audit, from the random operands to the ranks that run them.

Bottom up: random operands and gradients in any memory layout, drawn from a seed; `Probe`, a forward and backward run on
one rank, and its `Answer`; `Pool`, the ranks, which are restarted after a crash or hang; and `Case`, what is known
about the function, shared by all checks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh.errors import ArgumentError, RankError
from gradmesh.launch import Ranks
from gradmesh.verify.auditing.findings import Finding
from gradmesh.verify.auditing.readings import Answer, Pairings, Pattern, Reading
from gradmesh.verify.auditing.subject import (
    Described,
    Failure,
    Subject,
    Watch,
    changed,
    current_subject,
    dense,
    of_error,
    set_subject,
    shared,
)

T = TypeVar("T")


def draw(shape: Sequence[int], dtype: torch.dtype, seed: int, owner: int, *, whole: bool = False) -> Tensor:
    """Random values: normally distributed, or `whole` ones that any floating-point dtype represents exactly.

    The owner is a rank, or the same number on every rank for a replicated value.
    """
    generator = torch.Generator(device="cpu").manual_seed(7919 * seed + 104729 * (owner + 1))
    size = (*shape, 2) if dtype.is_complex else tuple(shape)
    if whole:
        sign = 2 * torch.randint(0, 2, size, generator=generator, device="cpu") - 1
        values = (sign * torch.randint(1, 8, size, generator=generator, device="cpu")).double()
    else:
        values = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
    return (torch.view_as_complex(values) if dtype.is_complex else values).to(dtype)


LAYOUTS = {
    "transposed": "transposed in memory",
    "gapped": "every other element of a larger tensor",
    "expanded": "expanded along dim 0",
    "flat": "one value expanded to all elements",
}
"""The non-contiguous memory layouts to try, with their description."""


def in_layout(x: Tensor, layout: str) -> Tensor | None:
    """A differentiable copy of a tensor in that layout, or None if its shape does not allow the layout.

    In an expanded layout the values are those of the first element or row.
    """
    if x.numel() < 2:
        return None
    if layout == "transposed":
        transposed = x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x
        return None if transposed.is_contiguous() else transposed
    if layout == "gapped":
        return torch.stack([x, 2 * x], -1)[..., 0]
    if layout == "expanded":
        return x[:1].expand_as(x) if x.shape[0] > 1 and x.ndim > 1 else None
    return x.reshape(-1)[0].expand(x.shape)


OTHER_OWNER = 100_000
"""The owner of values that a rank draws in place of its own."""
_COTANGENTS = 1000
"""Seed offset of the gradients of results."""


@dataclass(frozen=True)
class Point:
    """Where a nonlinear function is differentiated, and with which step."""

    step: float = 0.0  # the step of central differences; 0 for a linear function, which is its own derivative
    # values of the operands that must be identical on every rank; for others each rank uses its own
    shared: tuple[Tensor | None, ...] = ()
    rotated: tuple[tuple[Tensor, ...], ...] = ()  # for each rank, operands that replace its own
    own: bool = True  # whether the point is the rank's own operands; False: it is zero


@dataclass(frozen=True)
class Redrawn:
    """A tensor for which ranks draw the values of other ranks."""

    of_result: bool  # whether it is the gradient of a result; False: an operand
    index: int
    owners: tuple[int, ...]  # for each rank, the rank whose values it draws; `OTHER_OWNER` for none of theirs


@dataclass(frozen=True)
class Probe:
    """One experiment: which operands and gradients to draw for a forward and backward run."""

    seed: int  # different seeds give different values
    alike: tuple[bool, ...] = ()  # which operands are identical on every rank
    alike_out: tuple[bool, ...] = ()  # which gradients of results are identical on every rank
    whole: bool = False  # whether values are small integers
    complex: bool = False  # whether to draw complex operands in place of real ones
    redrawn: Redrawn | None = None  # an operand or a gradient for which ranks draw the values of other ranks
    point: Point = field(default_factory=Point)  # where a nonlinear function is differentiated


def configure(settings: Mapping[str, Any]) -> None:
    """Set attributes of this rank's subject."""
    subject = current_subject()
    for name, value in settings.items():
        setattr(subject, name, value)


def attempt(run: Callable[..., T], probes: Sequence[Probe], *args: Any) -> list[T | Failure]:
    """Call `run(subject, probe, *args)` for each probe, up to the first that raises."""
    answers: list[T | Failure] = []
    for probe in probes:
        try:
            answers.append(run(current_subject(), probe, *args))
        except (Exception, SystemExit) as error:
            answers.append(of_error(error))
            break
    return answers


def forward_only(subject: Subject, probe: Probe) -> Answer:
    """Forward, or the derivative of a nonlinear function."""
    return Answer(*mapped(subject, probe))


def drawn(subject: Subject, probe: Probe) -> list[Tensor]:
    """The operands of a probe."""
    kinds = [
        (subject.inputs[at].shape, subject.operand_dtype(i, probe.complex))
        for i, at in enumerate(subject.operands)
    ]
    return _draw_all(subject, probe, kinds, probe.alike, of_results=False)


def cotangents(subject: Subject, probe: Probe, results: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the results of a probe."""
    return _draw_all(subject, probe, [(y.shape, y.dtype) for y in results], probe.alike_out, of_results=True)


def _draw_all(
    subject: Subject,
    probe: Probe,
    kinds: Sequence[tuple[torch.Size, torch.dtype]],
    alike: Sequence[bool],
    of_results: bool,
) -> list[Tensor]:
    seed = probe.seed + (_COTANGENTS if of_results else 0)
    values = []
    for i, (shape, dtype) in enumerate(kinds):
        owner = subject.rank
        if alike and alike[i]:
            owner = -1
        elif probe.redrawn is not None and (probe.redrawn.of_result, probe.redrawn.index) == (of_results, i):
            owner = probe.redrawn.owners[subject.rank]
        values.append(draw(shape, dtype, seed + 31 * i, owner, whole=probe.whole))
    return values


def leaves_of(subject: Subject, probe: Probe) -> list[Tensor]:
    """The operands to call the function with: random ones, or the point of differentiation."""
    own = probe.point.step and probe.point.own
    return point_of(subject, probe) if own else [x.clone() for x in drawn(subject, probe)]


def point_of(subject: Subject, probe: Probe) -> list[Tensor]:
    """The point where a nonlinear function is differentiated."""
    same = probe.alike or (False,) * len(subject.operands)
    values = []
    for i in range(len(subject.operands)):
        shared = probe.point.shared[i] if probe.point.shared and same[i] else None
        shared = probe.point.rotated[subject.rank][i] if probe.point.rotated else shared
        value = subject.inputs[subject.operands[i]].detach() if shared is None else shared
        value = value.to(subject.operand_dtype(i, probe.complex))
        values.append(value.clone() if probe.point.own else torch.zeros_like(value))
    return values


def mapped(subject: Subject, probe: Probe) -> tuple[list[Tensor], list[Tensor]]:
    """The drawn operands, and the function (or its derivative) applied to them."""
    x = drawn(subject, probe)
    if not probe.point.step:
        return x, filled(subject.call([v.clone() for v in x]))
    base, step = point_of(subject, probe), probe.point.step
    ahead, behind = shifted(subject, base, step, x), shifted(subject, base, -step, x)
    return x, [difference(a, b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]


def shifted(subject: Subject, base: Sequence[Tensor], step: float, along: Sequence[Tensor]) -> list[Tensor]:
    """The results at `base + step * along`."""
    with torch.no_grad():
        return filled(subject.call([b + step * v for b, v in zip(base, along, strict=True)]))


def difference(a: Tensor, b: Tensor) -> Tensor:
    """A - b, and 0 where both are the same infinity, as in masked scores."""
    return torch.where(a == b, torch.zeros_like(a), a - b)


def first_order(subject: Subject, probe: Probe) -> Answer:
    """Forward and backward."""
    answer = Answer(*mapped(subject, probe)) if probe.point.step else Answer(drawn(subject, probe))
    notes = answer.notes
    before = leaves_of(subject, probe)
    with subject.differentiated(leaves_of(subject, probe)) as graph:
        given, results = graph.given, graph.results
        notes += changed("operand-overwritten", "forward writes into operand {}", given, before, [])
        notes += shared(given, results)
        out = filled(results)
        if not probe.point.step:
            answer.results = out
        answer.cotangents = cotangents(subject, probe, results)
        handed = [y.clone() for y in answer.cotangents]
        watched = Watch(results)
        answer.lines, answer.scaled = watched.lines, watched.scaled
        before = [x.detach().clone() for x in given]
        grads = graph.backward(handed)
    answer.reached = any(g is not None for g in grads)
    answer.gradients = dense(grads, graph.leaves)
    text = "backward writes into the gradient of result {}"
    notes += watched.notes() or changed("gradient-overwritten", text, handed, answer.cotangents, answer.lines)
    notes += changed("operand-overwritten", "backward writes into operand {}", given, before, answer.lines)
    text = "backward writes into result {}, which other code may read"
    notes += changed("saved-buffer-overwritten", text, results, out, answer.lines)
    return answer


def filled(results: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the results; waits for those that are still pending."""
    return [y.detach().clone().resolve_conj() for y in results]


class ProbeError(Exception):
    """The function did not return on every rank."""

    kind: str  # "aborts", "hangs" or "raises"
    ranks: tuple[int, ...]  # the ranks on which that was observed, if known
    refused = False  # whether verbs in forward ask for the sizes of their operands, where it failed
    # the exceptions of the ranks, by rank; empty if a rank died or timed out
    failures: Mapping[int, Failure] = {}

    @property
    def waited(self) -> bool:
        """Whether ranks may be waiting for others, so that another run may end with a timeout."""
        return not self.failures or any(failure.waited for failure in self.failures.values())


class RanksLostError(ProbeError):
    """A rank died or timed out."""

    def __init__(self, error: RankError) -> None:
        super().__init__(str(error).splitlines()[0].removeprefix("gradmesh.launch: "))
        died = "its process" in str(error) or "closed pipe" in str(error)
        self.kind = "aborts" if died else "hangs"
        self.ranks = () if error.rank is None else (error.rank,)


class FunctionRaisedError(ProbeError):
    """The function raised an exception, or ranks waited for others in vain."""

    def __init__(self, failures: Mapping[int, Failure]) -> None:
        # To show: preferably not from a rank that only waited for another one.
        rank, self.first = min(failures.items(), key=lambda item: item[1].waited)
        seen = {(f.stage, "if the sizes differ on purpose" in f.text) for f in failures.values()}
        self.refused = seen == {("forward", True)}  # the remedy of a MismatchError
        self.kind = "hangs" if self.first.waited else "raises"
        verb = "waits" if self.first.waited and not self.refused else "raises"
        text = re.sub(r"\s+", " ", self.first.first)
        super().__init__(f"{self.first.stage} {verb}: {text[:300]}")
        self.ranks, self.rank = tuple(sorted(failures)), rank
        self.failures = failures


def accepted(build: Callable[..., Any], name: str) -> bool:
    """Whether `build` accepts a keyword."""
    try:
        parameters = inspect.signature(build).parameters
    except (TypeError, ValueError):
        return False
    found = parameters.get(name)
    return found is not None and found.kind in (found.KEYWORD_ONLY, found.POSITIONAL_OR_KEYWORD)


class Pool:
    """Ranks that hold a function and run probes on it; a context manager."""

    def __init__(
        self,
        build: Callable[..., Any],
        world_size: int,
        backend: str,
        timeout: float,
        options: Mapping[str, Any],
        outside: int = 0,
    ) -> None:
        self.size = world_size
        self._outside = outside  # additional, idle ranks with the lowest numbers; `build` gets group=
        self.backend = backend
        self.settings: dict[str, Any] = {}
        self._build = build
        self._timeout = timeout
        self._options = dict(options)
        self._holds = False
        self._ranks = Ranks(world_size + outside, backend=backend, timeout=timeout, prefix=False)
        self._described: list[Described] = []

    def begin(self) -> list[Described]:
        """Call `build` on the ranks, if they do not hold the function yet."""
        if not self._holds:
            try:
                with _without_warnings():
                    described = self._ranks.run(
                        _begin, self._build, self._options, self._outside, self.settings
                    )
            except RankError as error:
                self._renew()
                if isinstance(error.__cause__, ArgumentError) and "verify.audit" in str(error.__cause__):
                    raise error.__cause__ from None
                raise
            self._described = [each for each in described if each is not None]
            self._holds = True
        return self._described

    def ask(self, question: Callable[..., T], *args: Any) -> list[T]:
        """Call `question(*args)` on each participating rank and return the answers."""
        self.begin()
        try:
            with _without_warnings():
                answers = self._ranks.run(_call_on_ranks, question, args, self._outside)
        except RankError as error:
            self._renew()
            raise RanksLostError(error) from error
        participating = cast("list[T]", answers[self._outside :])
        failed = _failures(participating)
        if _out_of_sync(failed, len(participating)):
            self._renew()
        for rank, failure in failed.items():
            if failure.kind == "SystemExit":
                text = f"rank {rank} ends its process in {failure.stage}: SystemExit"
                raise RanksLostError(RankError(text, rank=rank))
        return participating

    def attempt(self, run: Callable[..., T], probes: Sequence[Probe], *args: Any) -> list[list[T | Failure]]:
        """Call `run(subject, probe, *args)` on each rank: for each rank, each probe's answer, up to an exception."""
        return self.ask(attempt, run, probes, *args)

    def answered(self, run: Callable[..., T], probes: Sequence[Probe], *args: Any) -> list[list[T]]:
        """Call `run(subject, probe, *args)` on each rank: for each probe, each rank's answer."""
        by_rank = self.attempt(run, probes, *args)
        if failed := _failures(by_rank):
            raise FunctionRaisedError(failed)
        return [list(row) for row in zip(*cast("list[list[T]]", by_rank), strict=True)]

    @contextlib.contextmanager
    def built_with(self, **options: Any) -> Iterator[None]:
        """Within the block the ranks hold the function that `build` returns for these keywords."""
        before, self._options, self._holds = self._options, {**self._options, **options}, False
        try:
            yield
        finally:
            self._options, self._holds = before, False

    def accepts(self, name: str) -> bool:
        """Whether `build` accepts a keyword."""
        return accepted(self._build, name)

    def like_this(self, backend: str | None = None, outside: int = 0) -> Pool:
        """A pool for the same function and settings, on another backend or with additional idle ranks."""
        pool = Pool(self._build, self.size, backend or self.backend, self._timeout, self._options, outside)
        pool.settings = dict(self.settings)
        return pool

    def configure(self, **settings: Any) -> None:
        """Set attributes of each rank's `Subject`, on these ranks and on those that replace them."""
        self.settings |= settings
        if self._holds:
            self.ask(configure, settings)

    def close(self) -> None:
        """Shut down the ranks."""
        self._holds = False
        self._ranks.close()

    def _renew(self) -> None:
        self._holds = False
        with contextlib.suppress(Exception):
            self._ranks.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _begin(
    build: Callable[..., Any], options: dict[str, Any], outside: int, settings: dict[str, Any]
) -> Described | None:
    rank = dist.get_rank()
    if outside:
        group = dist.new_group(list(range(outside, dist.get_world_size())))
        if rank < outside:
            return None
        options = {**options, "group": group}
    local = {"local_rank": rank} if options.get("local_rank", 0) is None else {}
    described = set_subject(build, {**options, **local}, rank - outside)
    configure(settings)
    return described


def _call_on_ranks(question: Callable[..., T], args: tuple[Any, ...], outside: int) -> T | None:
    return None if dist.get_rank() < outside else question(*args)


def _failures(answers: Sequence[object]) -> dict[int, Failure]:
    """The exceptions of the ranks, by rank."""
    return {
        rank: part
        for rank, answer in enumerate(answers)
        for part in (answer if isinstance(answer, list) else ())
        if isinstance(part, Failure)
    }


def _out_of_sync(failed: Mapping[int, Failure], ranks: int) -> bool:
    """Whether the ranks may be out of sync: some raised, but not all of them the same exception."""
    same = {(failure.stage, failure.kind) for failure in failed.values()}
    return 0 < len(failed) < ranks or len(same) > 1 or any(failure.waited for failure in failed.values())


_without_warnings = functools.partial(warnings.catch_warnings, action="ignore")
"""Suppresses torch's warnings about the audited function: they are not findings."""


@dataclass
class Case:
    """The function under audit."""

    pool: Pool  # the ranks
    linear: bool = True  # whether it is linear
    tolerance: float = 1e-9  # the relative difference up to which two numbers count as equal
    whole: bool = False  # whether to draw integers, because the function rounds other values
    point: Point = field(default_factory=Point)  # where to differentiate it, if it is not linear
    # the shape of each operand; None where it differs between ranks
    shapes: list[tuple[int, ...] | None] = field(default_factory=list)
    # the shape of each result; None where it differs between ranks
    out_shapes: list[tuple[int, ...] | None] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)  # the readings that hold
    arrows: list[Reading] = field(default_factory=list)  # the strongest of them
    arrow: str | None = None  # the requested reading, as text; None: any
    name: str = ""  # the function's name
    gloo: bool = True  # whether to also test functions that call torch.distributed on processes with Gloo
    assumes: tuple[str, ...] = ()  # the conditions under which the gradient is correct
    senders: set[int] = field(default_factory=set)  # the tried ranks on whose operands results depend
    left_out: dict[str, str] = field(default_factory=dict)  # kinds that could not be checked, with the reason
    scaled: str = ""  # for findings, if gm.scale_gradient is in the graph
    unchecked: str = ""  # why nothing can be checked; empty otherwise
    # the first-order answers and their inner products, by pattern
    pairings: dict[Pattern, Pairings] = field(default_factory=dict)
    line: str | None = None  # "file:line" for findings about backward
    forward_line: str | None = None  # "file:line" for findings about forward

    def probe(self, seed: int, pattern: Pattern | None = None, **changes: object) -> Probe:
        """A probe of this function."""
        alike, alike_out = pattern or ((), ())
        made = Probe(seed, alike, alike_out, self.whole, point=self.point)
        return replace(made, **changes)  # type: ignore[arg-type]

    def failure(self, kind: str, error: ProbeError, what: str) -> Finding:
        """The finding that the function raised, crashed or hung."""
        if isinstance(error, FunctionRaisedError):
            return Finding(kind, f"{what}: {error}", error.ranks, error.first.line or self.line)
        verb = "the process exits" if error.kind == "aborts" else "the call hangs"
        return Finding(kind, f"{what}: {verb}: {error}", error.ranks, self.line)
