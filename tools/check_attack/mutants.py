"""Faults as people make them, put into the text of a program."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GRADIENT_SUM = r"^(?P<space> +)(?P<call>dist\.(?:all_reduce|reduce)\((?:p\.grad|grad|flat)\b.*\))$"
_IN_CLIP = r"^(?P<space> +)dist\.all_reduce\((?:shards|experts), .*\)$"
_ANY_CALL = r"^(?P<space> +)(?P<call>dist\.[a-z_]+\((?!\)).*\))$"

_RULES: tuple[tuple[str, str, str], ...] = (
    ("a sum left out", _GRADIENT_SUM, r"\g<space>pass"),
    ("a sum left out", r"return summed\(grad, (?:ctx\.)?group\)", "return grad"),
    ("a sum left out", r"lambda grad: summed\(grad, group\)", "lambda grad: grad"),
    ("a sum left out", r"return summed\(x, group\)$", "return x.clone()"),
    ("summed twice", _GRADIENT_SUM, r"\g<space>\g<call>\n\g<space>\g<call>"),
    ("summed twice", r"return grad, None$", "return summed(grad, ctx.group), None"),
    (
        "divided again",
        r"^(?P<space> +)(?P<line>(?:p\.grad|grad|flat|own) /= DP_SIZE)$",
        r"\g<space>\g<line>\n\g<space>\g<line>",
    ),
    ("not divided", r"^(?P<space> +)(?:p\.grad|grad|flat|own) /= DP_SIZE$", r"\g<space>pass"),
    ("another group", r"\bgroup=TP\b", "group=DP"),
    ("another group", r"\bgroup=DP\b", "group=TP"),
    ("another group", r", TP\)", ", dist.group.WORLD)"),
    ("another group", r", group=(?:TP|DP)\)", ")"),
    ("own slice in backward", r"return sum_then_own_part\(grad", "return own_part(grad"),
    ("a sum before the slice", r"return own_part\(grad", "return sum_then_own_part(grad"),
    (
        "wrong adjoint",
        r"return gathered\(grad, ctx\.dim, ctx\.group\)",
        "return gathered(grad, ctx.dim, ctx.group) / dist.get_world_size(ctx.group)",
    ),
    (
        "wrong adjoint",
        r"return gathered\(grad, ctx\.dim, ctx\.group\)",
        "return gathered(grad.flip(0), ctx.dim, ctx.group)",
    ),
    (
        "wrong adjoint",
        r"return summed\(grad, (?P<group>(?:ctx\.)?group)\)",
        r"return summed(grad, \g<group>) / dist.get_world_size(\g<group>)",
    ),
    (
        "detached",
        r"\b(?P<call>(?:Copy|Reduce|GatherWhole|GatherParts|Scatter|ReduceScatter|Exchange)\.apply)\((?P<x>[\w.]+),",
        r"\g<call>(\g<x>.detach(),",
    ),
    ("detached", r"distnn\.all_reduce\((?P<x>[\w.()]+),", r"distnn.all_reduce(\g<x>.detach(),"),
    (
        "a raw collective",
        r"^(?P<space> +)mean, square = \(distnn\.all_reduce\(moments, group=DP\)",
        r"\g<space>dist.all_reduce(moments, group=DP)\n\g<space>mean, square = (moments",
    ),
    (
        "a raw collective",
        r"\bReduce\.apply\((?P<x>\w+), TP\)",
        r"(dist.all_reduce(\g<x>, group=TP), \g<x>)[1]",
    ),
    (
        "a raw collective",
        r"\bGatherParts\.apply\((?P<x>\w+), (?P<dim>\S+), (?P<group>\w+)\)",
        r"gathered(\g<x>, \g<dim>, \g<group>)",
    ),
    ("not marked", r"on_own_tokens\((?P<made>\w+\.?\w*\(.*\))\)$", r"\g<made>"),
    ("not marked", r"^(?P<space> +)self\.\w+\.(?:sequence_parallel|expert) = True$", r"\g<space>pass"),
    (
        "marked too many",
        r"^(?P<space> +self\.(?:block\d|head|embed) = )(?P<made>(?:nn\.|[A-Z])\w+\.?\w*\(.*\))$",
        r"\g<space>on_own_tokens(\g<made>)",
    ),
    ("seeded apart", r"^torch\.manual_seed\((?P<seed>\d+)\)$", r"torch.manual_seed(\g<seed> + rank)"),
    ("seeded apart", r"manual_seed\(11\)", "manual_seed(11 + rank)"),
    ("seeded apart", r"100 \* step \+ dp_rank\)", "100 * step + rank)"),
    ("no broadcast", r"^(?P<space> +)dist\.broadcast\(p\.data, src=0\)$", r"\g<space>pass"),
    (
        "maximum",
        r"^(?P<space> +)dist\.all_reduce\((?P<x>p\.grad|grad|flat)",
        r"\g<space>dist.all_reduce(\g<x>, op=dist.ReduceOp.MAX",
    ),
    (
        "left out of the sum",
        r"(?<=def sync_gradients\(\):\n)(?P<space> +)for p in model\.parameters\(\):",
        r"\g<space>for p in list(model.parameters())[1:]:",
    ),
    ("left out of the sum", r"shared = (?P<held>\[.*\])$", r"shared = \g<held>[:-1]"),
    (
        "left out of the sum",
        r"^for p in model\.parameters\(\):\n(?=    p\.register)",
        "for p in list(model.parameters())[:-1]:\n",
    ),
    ("rate by rank", r"\blr ?= ?(?P<rate>0\.\d+)", r"lr=\g<rate> * (1 + rank)"),
    ("own norm", _IN_CLIP, r"\g<space>pass"),
    ("written in place", r"x = x\.contiguous\(\)\.clone\(\)", "x = x.contiguous()"),
    ("a rank does not call", _ANY_CALL, r"\g<space>if rank != 0:\n\g<space>    \g<call>"),
    ("a step less", r"for step in range\(2\):", "for step in range(2 - (rank == 0)):"),
    (
        "other rows",
        r"rows = slice\(dp_rank \* B // DP_SIZE, \(dp_rank \+ 1\) \* B // DP_SIZE\)",
        "rows = slice(rank * B // world, (rank + 1) * B // world)",
    ),
    ("other tokens", r"arange\(T\)\.chunk\(TP_SIZE\)\[tp_rank\]", "arange(T).chunk(TP_SIZE)[0]"),
    (
        "added before the sum",
        r"inner = F\.linear\(inner, self\.down\)\n(?P<rest> +return h \+ .*) \+ self\.bias$",
        r"inner = F.linear(inner, self.down, self.bias)\n\g<rest>",
    ),
    (
        "own part of the gradient",
        r"dist\.reduce_scatter_tensor\(own, flat, group=DP\)",
        "own.copy_(flat.chunk(DP_SIZE)[dp_rank])",
    ),
    ("not sent back", r"^(?P<space> +)dist\.broadcast\(p\.data, src=at .*\)$", r"\g<space>pass"),
    ("reduced in place of its average", r" / \(B \* T\)", " / (B * T) / world"),
)
KINDS = tuple(dict.fromkeys(kind for kind, *_ in _RULES))


@dataclass(frozen=True)
class Mutant:
    """A program with a fault, or with a change that is none."""

    kind: str  # what was done
    line: int  # where, in the text of the program
    text: str  # of the script


def mutants(text: str) -> list[Mutant]:
    """Every way to put a fault into a program."""
    found = []
    for kind, pattern, replacement in _RULES:
        for match in re.finditer(pattern, text, re.MULTILINE):
            changed = text[: match.start()] + match.expand(replacement) + text[match.end() :]
            if _is_defined(changed, replacement):
                found.append(Mutant(kind, text.count("\n", 0, match.start()) + 1, changed))
    return found


def _is_defined(text: str, replacement: str) -> bool:
    """Whether what was put in is there to be used."""
    for name, where in (
        ("summed(", "def summed("),
        ("own_part(", "def own_part("),
        ("gathered(", "def gathered("),
        ("on_own_tokens(", "def on_own_tokens("),
        ("group=TP", "TP ="),
        ("group=DP", "DP ="),
    ):
        if name in replacement and where not in text and f", {where}" not in text:
            return False
    return True
