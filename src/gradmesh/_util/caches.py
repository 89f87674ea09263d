"""A cache of bounded size."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

_MOST = 256


class BoundedCache(dict[Hashable, Any]):
    """A dict that is cleared when it is full, so that shapes that do not recur cannot accumulate.

    >>> memo = BoundedCache()
    >>> for n in range(1000):
    ...     memo[n] = n
    >>> len(memo) <= 256
    True
    """

    def __setitem__(self, key: Hashable, value: Any) -> None:
        if len(self) >= _MOST:
            self.clear()
        super().__setitem__(key, value)
