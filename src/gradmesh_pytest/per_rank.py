"""Values of fixtures that every rank has one of its own of, made on the rank."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["RankGenerator", "Subtest", "Subtests", "resolved"]


@dataclasses.dataclass(frozen=True)
class RankGenerator:
    """A `torch.Generator` for each rank."""

    seed: int

    def of(self, rank: int) -> torch.Generator:
        """Make that of a rank."""
        return torch.Generator().manual_seed(self.seed + rank)


@dataclasses.dataclass
class Subtest:
    """How a subtest ended on a rank.

    Attributes:
        message: what it was called.
        values: what it was told.
        error: what ended it, or None.
    """

    message: str | None
    values: dict[str, str]
    error: BaseException | None = None


class Subtests:
    """Stands for pytest's fixture `subtests` on a rank, and for `TestCase.subTest`; keeps how each of them ended."""

    def __init__(self) -> None:
        self.ended: list[Subtest] = []

    @contextlib.contextmanager
    def test(self, msg: str | None = None, **kwargs: Any) -> Iterator[None]:
        """Run a block whose failure does not end the test."""
        found = Subtest(None if msg is None else str(msg), {name: repr(kwargs[name]) for name in kwargs})
        try:
            yield
        except (SystemExit, KeyboardInterrupt, GeneratorExit):
            raise  # of the launcher, which ends the rank
        except BaseException as error:
            found.error = error
        self.ended.append(found)


def resolved(values: Mapping[str, object], rank: int, subtests: Subtests) -> dict[str, object]:
    """The values of fixtures on a rank.

    Args:
        values: as they come from pytest.
        rank: of the world.
        subtests: what stands there for the fixture `subtests`.
    """

    def own(value: object) -> object:
        if isinstance(value, RankGenerator):
            return value.of(rank)
        return subtests if isinstance(value, Subtests) else value

    return {name: own(value) for name, value in values.items()}
