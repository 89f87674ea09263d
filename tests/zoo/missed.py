"""Programs whose report is wrong, and why; a report that becomes right has to be taken out here."""

from __future__ import annotations

__all__ = ["MISSED"]

MISSED: dict[str, str] = {
    "gather_cached_under_checkpoint": "the term is lost before there is a graph, so that no collective in it has a "
    "gradient that could be changed to see what becomes of it",
}
