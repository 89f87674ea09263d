"""Optional dependencies and the extras that install them."""

from __future__ import annotations

from importlib.util import find_spec

from gradmesh.errors import MissingExtraError, message

__all__ = ["EXTRAS", "missing", "require"]

EXTRAS = {
    "cli": ("click", "rich"),
    "demo": ("click", "rich", "matplotlib", "numpy", "sklearn"),
    "forces": ("click", "rich", "matplotlib", "numpy", "ase", "e3nn", "matscipy"),
    "metis": ("pymetis",),
    "notebook": ("cloudpickle",),
}
"""The modules that each extra installs, by import name."""


def missing(extra: str) -> list[str]:
    """The modules of an extra that are not installed; none is imported."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]


def require(extra: str, who: str) -> None:
    """Raise if an extra that `who` needs is not installed.

    Raises:
        MissingExtraError: it is not installed.
    """
    if absent := missing(extra):
        raise MissingExtraError(
            message(
                "an optional dependency is not installed",
                op=who,
                expected=", ".join(EXTRAS[extra]),
                got="not installed: " + ", ".join(absent),
                remedy=f"pip install 'gradmesh[{extra}]'",
            )
        )
