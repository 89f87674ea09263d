"""A dict for what was worked out once, which cannot grow without end."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

__all__ = ["BoundedCache"]

_MOST = 256


class BoundedCache(dict[Hashable, Any]):
    """A dict that begins anew when it is full: shapes that never come again must not pile up.

    >>> memo = Memo()
    >>> for n in range(1000):
    ...     memo[n] = n
    >>> len(memo) <= 256
    True
    """

    def __setitem__(self, key: Hashable, value: Any) -> None:
        if len(self) >= _MOST:
            self.clear()
        super().__setitem__(key, value)
