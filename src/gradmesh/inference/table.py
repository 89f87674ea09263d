"""THE table."""

from __future__ import annotations

__all__ = ["rule_of"]

TABLE = {"add": "0+1", "mul": "0*1", "exp": "!0", "sum": "0", "ones_like": "=S", "zeros_like": "=Z", "zeros":"=Z", "view": "0", "expand": "0", "detach":"0", "lift_fresh":"0","pow":"!0 !1","mm":"0*1","t":"0", "randn": "~"}


def rule_of(name: str) -> str | None:
    """The rule of an operator."""
    for one in (name, name.removesuffix("_"), name.removeprefix("_foreach_").removesuffix("_")):
        if one in TABLE:
            return TABLE[one]
    return None
