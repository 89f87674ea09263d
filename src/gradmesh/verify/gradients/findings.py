"""The result of a diagnosis: the hypothesis that explains the gradients, and the collective that causes them."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["NONE_FITS", "TOO_FEW_DIGITS", "Diagnosis", "Suspect"]

NONE_FITS = "none fits"
TOO_FEW_DIGITS = "the loss has too few digits"


@dataclass(frozen=True)
class Suspect:
    """A collective that may be at fault.

    Attributes:
        call: its name and call site.
        why: the evidence.
        mends: whether changing only this collective makes every gradient correct.
    """

    call: str
    why: str
    mends: bool = False

    def __str__(self) -> str:
        return f"{self.call}: {self.why}"


@dataclass
class Diagnosis:
    """Why gradients are wrong.

    Attributes:
        hypothesis: the name of the hypothesis that fits, or "none fits".
        text: its description for this program.
        names: the leaves whose gradients are wrong.
        ranks: the ranks on which they are wrong.
        suspects: the collectives that may be at fault, the most likely first.
        also: other hypotheses that fit as well.
    """

    hypothesis: str
    text: str
    names: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    also: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"  diagnosis: {self.hypothesis}: {self.text}"]
        if self.names:
            lines.append(
                f"    gradients  {', '.join(self.names)}, on ranks {', '.join(map(str, self.ranks))}"
            )
        if self.also:
            lines.append(f"    or         {'; '.join(self.also)}")
        for i, suspect in enumerate(self.suspects[:3]):
            lines.append(f"    {'most likely' if i == 0 else 'or'} {suspect}")
        return "\n".join(lines)
