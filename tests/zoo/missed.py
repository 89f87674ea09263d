"""Programs whose report is wrong, and why; a report that becomes right has to be taken out here."""

from __future__ import annotations

__all__ = ["MISSED"]

MISSED: dict[str, str] = {
    "gather_cached_under_checkpoint": "the term is lost before the graph is made, so that no collective in it has a gradient "
    "to be scaled",
}
