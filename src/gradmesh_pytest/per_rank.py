"""Values of fixtures that every rank has one of its own of, made on the rank."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

__all__ = ["PerRank", "RankGenerator", "Subtest", "Subtests", "resolved"]


class PerRank(Protocol):
    """What stands for a value until the rank is known."""

    def of(self, rank: int, subtests: Subtests) -> object:
        """Make the value of a rank."""


@dataclasses.dataclass(frozen=True)
class RankGenerator:
    """A `torch.Generator` for each rank."""

    seed: int

    def of(self, rank: int, subtests: Subtests) -> torch.Generator:
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

    def of(self, rank: int, subtests: Subtests) -> Subtests:
        """The ones that are kept on this rank."""
        return subtests


def resolved(values: Mapping[str, object], rank: int, subtests: Subtests) -> dict[str, object]:
    """The values of fixtures on a rank."""
    kinds = (RankGenerator, Subtests)
    return {
        name: value.of(rank, subtests) if isinstance(value, kinds) else value for name, value in values.items()
    }
