"""Fixture values that are created separately on each rank."""

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
        """Create a rank's generator."""
        return torch.Generator().manual_seed(self.seed + rank)


@dataclasses.dataclass
class Subtest:
    """The outcome of a subtest on a rank.

    Attributes:
        message: its message.
        values: its keyword arguments.
        error: its error, or None.
    """

    message: str | None
    values: dict[str, str]
    error: BaseException | None = None


class Subtests:
    """Replaces pytest's fixture `subtests` and `TestCase.subTest` on a rank; records the outcomes."""

    def __init__(self) -> None:
        self.ended: list[Subtest] = []

    @contextlib.contextmanager
    def test(self, msg: str | None = None, **kwargs: Any) -> Iterator[None]:
        """Run a block whose failure does not end the test."""
        found = Subtest(None if msg is None else str(msg), {name: repr(kwargs[name]) for name in kwargs})
        try:
            yield
        except (SystemExit, KeyboardInterrupt, GeneratorExit):
            raise  # raised by the launcher to stop the rank
        except BaseException as error:
            found.error = error
        self.ended.append(found)


def resolved(values: Mapping[str, object], rank: int, subtests: Subtests) -> dict[str, object]:
    """The fixture values on a rank.

    Args:
        values: pytest's values.
        rank: the rank in the world.
        subtests: the replacement of the fixture `subtests`.
    """

    def resolve(value: object) -> object:
        if isinstance(value, RankGenerator):
            return value.of(rank)
        return subtests if isinstance(value, Subtests) else value

    return {name: resolve(value) for name, value in values.items()}
