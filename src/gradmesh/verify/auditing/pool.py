"""The ranks that a function runs on: questions to all of them, and new ranks after one that broke the old."""

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
from gradmesh.verify.auditing.subject import Described, Trouble, hold

__all__ = ["LostError", "Pool", "accepted"]

T = TypeVar("T")


_QUITS = "rank {} ends its process in {}: SystemExit"


class LostError(Exception):
    """The ranks did not come back: one died, or did not return in time.

    Attributes:
        kind: "aborts" or "hangs".
        text: what the launcher says.
        ranks: the rank that it names.
    """

    def __init__(self, error: RankError) -> None:
        super().__init__(str(error))
        self.text = str(error).splitlines()[0].removeprefix("gradmesh.launch: ")
        died = "its process" in str(error) or "closed pipe" in str(error)
        self.kind = "aborts" if died else "hangs"
        self.ranks = () if error.rank is None else (error.rank,)


def accepted(build: Callable[..., Any], name: str) -> bool:
    """Whether `build` takes a keyword."""
    try:
        parameters = inspect.signature(build).parameters
    except (TypeError, ValueError):
        return False
    found = parameters.get(name)
    return found is not None and found.kind in (found.KEYWORD_ONLY, found.POSITIONAL_OR_KEYWORD)


class Pool:
    """Ranks that hold a function and answer questions about it.

    A context manager.

    Args:
        build: makes the function on each rank.
        world_size: how many ranks take part.
        backend: as for `gradmesh.launch`.
        timeout: seconds that a question may take.
        options: what `build` is called with.
        outside: how many ranks there are besides, which come first and take no part: then `build` gets the group of
            the others as `group=`.
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
        """Have the ranks hold the function, if they do not.

        Raises:
            ArgumentError: `build` does not return a function and its inputs.
            RankError: `build` fails.
        """
        if not self._holds:
            try:
                with _silent():
                    told = self._ranks.run(_begin, self._build, self._options, self.outside, self.settings)
            except RankError as error:
                self._renew()
                if isinstance(error.__cause__, ArgumentError) and "verify.audit" in str(error.__cause__):
                    raise error.__cause__ from None
                raise
            self.described = [each for each in told if each is not None]
            self._holds = True
        return self.described

    def ask(self, question: Callable[..., T], *args: Any) -> list[T]:
        """Each rank's answer to a question; ranks that take no part have none.

        Raises:
            LostError: the ranks did not come back.
        """
        self.begin()
        try:
            with _silent():
                answers = self._ranks.run(_asked, question, args, self.outside)
        except RankError as error:
            self._renew()
            raise LostError(error) from error
        taking_part = cast("list[T]", answers[self.outside :])
        if _apart(taking_part):
            self._renew()
        for rank, answer in enumerate(taking_part):
            for trouble in _troubles(answer):
                if trouble.kind == "SystemExit":
                    raise LostError(RankError(_QUITS.format(rank, trouble.stage), rank=rank))
        return taking_part

    @contextlib.contextmanager
    def built_with(self, **options: Any) -> Iterator[None]:
        """Have the ranks hold what `build` makes with these keywords, for a while."""
        before, self._options, self._holds = self._options, {**self._options, **options}, False
        try:
            yield
        finally:
            self._options, self._holds = before, False

    def takes(self, name: str) -> bool:
        """Whether `build` takes a keyword."""
        return accepted(self._build, name)

    def on(self, backend: str) -> Pool:
        """Ranks on another backend that hold the same function in the same way."""
        pool = Pool(self._build, self.size, backend, self._timeout, self._options)
        pool.settings = dict(self.settings)
        return pool

    def larger(self, outside: int) -> Pool:
        """Ranks for the same function, behind others that take no part."""
        pool = Pool(self._build, self.size, self._ranks.backend, self._timeout, self._options, outside)
        pool.settings = dict(self.settings)
        return pool

    def configure(self, **settings: Any) -> None:
        """Change what the function is held with, on these ranks and those that replace them."""
        self.settings |= settings
        if self._holds:
            self.ask(_configure, settings)

    def close(self) -> None:
        """End the ranks."""
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
    described = hold(build, {**options, **local}, rank - outside)
    configure(**settings)
    return described


def _asked(question: Callable[..., T], args: tuple[Any, ...], outside: int) -> T | None:
    return None if dist.get_rank() < outside else question(*args)


def _configure(settings: dict[str, Any]) -> None:
    configure(**settings)


def _apart(answers: list[Any]) -> bool:
    """Whether the ranks may have come out of step: one raised, and not all of them the same."""
    troubles = [trouble for answer in answers for trouble in _troubles(answer)]
    if not troubles:
        return False
    same = {(trouble.stage, trouble.kind) for trouble in troubles}
    return len(same) > 1 or len(troubles) < len(answers) or any(trouble.waited for trouble in troubles)


def _troubles(answer: Any) -> list[Trouble]:
    parts = answer if isinstance(answer, list) else [answer]
    return [part.trouble for part in parts if isinstance(part, Answer) and part.trouble is not None]


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What torch warns of in the functions of others is not for whoever asked for an audit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
