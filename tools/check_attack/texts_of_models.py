"""The text of a program's model: its modules, and how they follow each other."""

from __future__ import annotations

import re
from textwrap import dedent, indent

from tools.check_attack.functions import CALLS
from tools.check_attack.pieces import PIECES
from tools.check_attack.programs import Placed, Program


def _filled(text: str, placed: Placed) -> str:
    """A piece's text, with its operations called in the ways that were drawn."""
    for (name, calls), way in zip(CALLS.items(), placed.ways, strict=True):
        found = re.search(rf"{{{name}\(([^()]*)\)}}", text)
        while found:
            x, dim, group = ([part.strip() for part in found[1].split(",")] + ["", ""])[:3]
            text = text.replace(found[0], calls[way].format(x=x, dim=dim, group=group))
            found = re.search(rf"{{{name}\(([^()]*)\)}}", text)
    return dedent(text).strip()


_CUT = """
    def cut(x, dim):
        p = nn.Parameter(x.detach().chunk(TP_SIZE, dim)[tp_rank].clone())
        p.tensor_parallel = True
        return p
    """
_MARK = """
    def on_own_tokens(module):
        for p in module.parameters():
            p.sequence_parallel = True
        return module
    """
_EMBEDDING = """
    class CutEmbedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = cut(torch.randn(V, D), 0)

        def forward(self, x):
            own = x - tp_rank * len(self.weight)
            outside = (own < 0) | (own >= len(self.weight))
            h = F.embedding(own.masked_fill(outside, 0), self.weight)
            h = h.masked_fill(outside[..., None], 0.0)
            return {reduce(h)}
    """


def classes(p: Program) -> list[str]:
    """The definitions of the modules that a model is made of."""
    texts: dict[str, str] = {}
    for placed in p.pieces:
        texts.setdefault(placed.piece, _filled(PIECES[placed.piece].text, placed))
    if p.embedding == "cut":
        texts["CutEmbedding"] = _filled(_EMBEDDING, Placed("", ""))
    if any("cut(" in text for text in texts.values()):
        texts = {"cut": dedent(_CUT).strip(), **texts}
    if _marks(p):
        texts = {"mark": dedent(_MARK).strip(), **texts}
    return list(texts.values())


def _marks(p: Program) -> bool:
    return p.begins == "tokens" or p.ends == "tokens" or any(_marked(placed) for placed in p.pieces)


def _marked(placed: Placed) -> bool:
    return placed.layout == "tokens" and placed.piece not in ("TokensMlp", "CopiedBias")


def has_parts(p: Program) -> bool:
    """Whether some gradients are parts on the tensor-parallel ranks."""
    return _marks(p) or any(placed.piece == "TokensMlp" for placed in p.pieces)


def model_of(p: Program) -> str:
    """The model's own class."""

    def marked(text: str, layout: str) -> str:
        return f"on_own_tokens({text})" if layout == "tokens" else text

    embedding = {"lookup": "nn.Embedding(V, D)", "linear": "nn.Linear(3, D)", "cut": "CutEmbedding()"}[
        p.embedding
    ]
    build = [f"self.embed = {marked(embedding, p.begins)}"]
    call = ["h = self.embed(x)"]
    layout = p.begins
    made: dict[tuple[str, str], int] = {}

    def moved(to: str) -> None:
        if layout != to:
            call.append(f"h = {'Scatter' if to == 'tokens' else 'GatherWhole'}.apply(h, 1, TP)")

    for at, placed in enumerate(p.pieces):
        moved(placed.layout)
        layout = placed.layout
        key = placed.piece, layout
        if placed.again:
            call.append(f"h = self.block{made[key]}(h)")
            continue
        made[key] = at
        text = f"{placed.piece}()"
        build.append(f"self.block{at} = {marked(text, layout) if _marked(placed) else text}")
        call.append(f"h = self.block{at}(h)")
    moved(p.ends)
    if p.tied:
        out = "F.linear(h, self.embed.weight)"
    else:
        build.append(f"self.head = {marked('nn.Linear(D, V)', p.ends)}")
        out = "self.head(h)"
    if p.has("unused"):
        build.append("self.unused = nn.Parameter(torch.zeros(3))")
    if p.has("first_rank"):
        build.append("self.extra = nn.Parameter(torch.ones(3))")
    call.append(f"return {out}, h" if p.has("aux") else f"return {out}")
    return (
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + indent("\n".join(build), " " * 8)
        + "\n\n    def forward(self, x):\n"
        + indent("\n".join(call), " " * 8)
    )
