"""The ranks that a function runs on: sends calls to all of them and restarts them after a crash or hang."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch.distributed as dist

from gradmesh.errors import ArgumentError, RankError
from gradmesh.launch import Ranks
from gradmesh.verify.auditing.probes import Answer, configure
from gradmesh.verify.auditing.subject import Described, Failure, set_subject

__all__ = ["Pool", "RanksLostError", "accepted"]

T = TypeVar("T")


_QUITS = "rank {} ends its process in {}: SystemExit"


class RanksLostError(Exception):
    """A rank died or timed out.

    Attributes:
        kind: "aborts" or "hangs".
        text: the launcher's message.
        ranks: the failed rank, if known.
    """

    def __init__(self, error: RankError) -> None:
        super().__init__(str(error))
        self.text = str(error).splitlines()[0].removeprefix("gradmesh.launch: ")
        died = "its process" in str(error) or "closed pipe" in str(error)
        self.kind = "aborts" if died else "hangs"
        self.ranks = () if error.rank is None else (error.rank,)


def accepted(build: Callable[..., Any], name: str) -> bool:
    """Whether `build` accepts a keyword."""
    try:
        parameters = inspect.signature(build).parameters
    except (TypeError, ValueError):
        return False
    found = parameters.get(name)
    return found is not None and found.kind in (found.KEYWORD_ONLY, found.POSITIONAL_OR_KEYWORD)


class Pool:
    """Ranks that hold a function and run probes on it; a context manager.

    Args:
        build: creates the function on each rank.
        world_size: the number of participating ranks.
        backend: as for `gradmesh.launch`.
        timeout: seconds that one call may take.
        options: keyword arguments for `build`.
        outside: the number of additional, idle ranks with the lowest numbers; `build` then gets the group of the
            participating ranks as `group=`.
    """

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
        self.outside = outside
        self.backend = backend
        self.settings: dict[str, Any] = {}
        self._build = build
        self._timeout = timeout
        self._options = dict(options)
        self._holds = False
        self._ranks = Ranks(world_size + outside, backend=backend, timeout=timeout, prefix=False)
        self.described: list[Described] = []

    def begin(self) -> list[Described]:
        """Call `build` on the ranks, if they do not hold the function yet.

        Raises:
            ArgumentError: `build` does not return a function and its inputs.
            RankError: `build` fails.
        """
        if not self._holds:
            try:
                with _silent():
                    described = self._ranks.run(
                        _begin, self._build, self._options, self.outside, self.settings
                    )
            except RankError as error:
                self._renew()
                if isinstance(error.__cause__, ArgumentError) and "verify.audit" in str(error.__cause__):
                    raise error.__cause__ from None
                raise
            self.described = [each for each in described if each is not None]
            self._holds = True
        return self.described

    def ask(self, question: Callable[..., T], *args: Any) -> list[T]:
        """Call `question(*args)` on each participating rank and return the answers.

        Raises:
            RanksLostError: a rank died or timed out.
        """
        self.begin()
        try:
            with _silent():
                answers = self._ranks.run(_call_on_ranks, question, args, self.outside)
        except RankError as error:
            self._renew()
            raise RanksLostError(error) from error
        taking_part = cast("list[T]", answers[self.outside :])
        if _out_of_sync(taking_part):
            self._renew()
        for rank, answer in enumerate(taking_part):
            for failure in _failures(answer):
                if failure.kind == "SystemExit":
                    raise RanksLostError(RankError(_QUITS.format(rank, failure.stage), rank=rank))
        return taking_part

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

    def on(self, backend: str) -> Pool:
        """A pool on another backend for the same function and settings."""
        pool = Pool(self._build, self.size, backend, self._timeout, self._options)
        pool.settings = dict(self.settings)
        return pool

    def larger(self, outside: int) -> Pool:
        """A pool for the same function with additional idle ranks."""
        pool = Pool(self._build, self.size, self._ranks.backend, self._timeout, self._options, outside)
        pool.settings = dict(self.settings)
        return pool

    def configure(self, **settings: Any) -> None:
        """Set attributes of each rank's `Subject`, on these ranks and on those that replace them."""
        self.settings |= settings
        if self._holds:
            self.ask(_configure, settings)

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
    configure(**settings)
    return described


def _call_on_ranks(question: Callable[..., T], args: tuple[Any, ...], outside: int) -> T | None:
    return None if dist.get_rank() < outside else question(*args)


def _configure(settings: dict[str, Any]) -> None:
    configure(**settings)


def _out_of_sync(answers: list[Any]) -> bool:
    """Whether the ranks may be out of sync: some raised, but not all of them the same exception."""
    failures = [failure for answer in answers for failure in _failures(answer)]
    if not failures:
        return False
    same = {(failure.stage, failure.kind) for failure in failures}
    return len(same) > 1 or len(failures) < len(answers) or any(failure.waited for failure in failures)


def _failures(answer: Any) -> list[Failure]:
    parts = answer if isinstance(answer, list) else [answer]
    return [part.failure for part in parts if isinstance(part, Answer) and part.failure is not None]


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Suppress torch's warnings about the audited function: they are not findings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
