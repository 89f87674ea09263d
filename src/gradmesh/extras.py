"""Optional dependencies: which extra brings which module, and the error for one that is not there."""

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
"""The modules that each extra brings, by the names they are imported with."""


def missing(extra: str) -> list[str]:
    """The modules of an extra that cannot be imported; they are looked for and not loaded."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]


def require(extra: str, who: str) -> None:
    """See that an extra is there before any work is done for `who`.

    Raises:
        MissingExtraError: it is not; the text says what to install.
    """
    if absent := missing(extra):
        raise MissingExtraError(
            message(
                "an optional dependency is not installed",
                op=who,
                expected=", ".join(EXTRAS[extra]),
                got="no " + ", ".join(absent),
                remedy=f"pip install 'gradmesh[{extra}]'",
            )
        )
