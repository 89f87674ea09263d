"""The text of how a program brings gradients together, and clips them."""

from __future__ import annotations

from textwrap import indent

from tools.check_attack.pieces import PIECES
from tools.check_attack.programs import AVERAGED, SHARDED, Program
from tools.check_attack.texts_of_models import has_parts


def synchronised(p: Program) -> str:
    """What brings gradients together; "" where nothing has to."""
    average = p.loss in AVERAGED
    experts = any(placed.piece == "Experts" for placed in p.pieces)
    partial = has_parts(p)
    absent = p.has("unused") or p.has("frozen")
    tp = (
        ['if getattr(p, "sequence_parallel", False):', "    dist.all_reduce(p.grad, group=TP)"]
        if partial
        else []
    )
    skip = ["if p.grad is None:", "    continue"] if absent else []
    own = []
    if experts:
        own = ['if getattr(p, "expert", False):', *["    p.grad /= DP_SIZE"] * average, "    continue"]
    first = ["if model.extra.grad is None:", "    model.extra.grad = torch.zeros(3)"] * p.has("first_rank")
    if p.sync in ("hooks", "late_hooks"):
        return _hooks(p, average, partial, experts)
    body: list[str] = [*first]
    loop = "for p in model.parameters():"
    if p.dp == 1 or p.sync in ("ddp", "fsdp2"):
        if not partial:
            return ""
        return "def sync_gradients():\n" + indent(
            "\n".join([loop, indent("\n".join([*skip, *tp]), "    ")]), "    "
        )
    if p.sync in SHARDED:
        return "def sync_gradients():\n" + indent("\n".join(_sharded(p.sync, average)), "    ")
    way = "each" if p.sync == "asked" else p.sync
    if way in ("each", "avg"):
        if way == "avg" and average:
            reduce = ["dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, group=DP)"]
        else:
            reduce = ["dist.all_reduce(p.grad, group=DP)", *["p.grad /= DP_SIZE"] * average]
        inner = [*skip, *tp, *own, *reduce]
        body += [loop, indent("\n".join(inner), "    ")]
    else:
        if partial:
            body += [loop, indent("\n".join([*skip, *tp]), "    ")]
        if experts and average:
            body += [loop, '    if getattr(p, "expert", False):', "        p.grad /= DP_SIZE"]
        conditions = ["p.grad is not None"] * absent + ['not getattr(p, "expert", False)'] * experts
        chosen = f" if {' and '.join(conditions)}" if conditions else ""
        body.append(f"shared = [p for p in model.parameters(){chosen}]")
        body += _together(way, average, "tp_rank" if p.tp > 1 else "0")
    if p.has("late_division"):
        body += [loop, *["    if p.grad is None:", "        continue"] * absent, f"    p.grad /= {p.micro}"]
    return "def sync_gradients():\n" + indent("\n".join(body), "    ")


def _sharded(way: str, average: bool) -> list[str]:
    """What brings each rank the gradient of its part."""
    if way == "zero1":
        return [
            "for p in parameters:",
            "    dist.all_reduce(p.grad, group=DP)",
            *["    p.grad /= DP_SIZE"] * average,
        ]
    if way == "zero2":
        return [
            "for at, p in enumerate(parameters):",
            "    dist.reduce(p.grad, dst=at % DP_SIZE, group=DP)",
            *["    p.grad /= DP_SIZE"] * average,
            "    if at % DP_SIZE != dp_rank:",
            "        p.grad = None",
        ]
    return [
        "flat = torch.cat([p.grad.flatten() for p in parameters])",
        "flat = F.pad(flat, (0, -len(flat) % DP_SIZE))",
        "own = torch.empty_like(master)",
        "dist.reduce_scatter_tensor(own, flat, group=DP)",
        *["own /= DP_SIZE"] * average,
        "master.grad = own",
    ]


def sent_back(p: Program) -> list[str]:
    """What sends the new values of each rank's part to the others."""
    if p.sync in ("zero1", "zero2"):
        return [
            "for at, p in enumerate(parameters):",
            "    dist.broadcast(p.data, src=at % DP_SIZE, group=DP)",
        ]
    if p.sync == "master":
        return [
            "whole = master.new_empty(len(master) * DP_SIZE)",
            "dist.all_gather_into_tensor(whole, master.detach(), group=DP)",
            "for p, part in zip(parameters, whole[: sum(sizes)].split(sizes)):",
            "    p.data.copy_(part.view_as(p))",
        ]
    return []


def _together(way: str, average: bool, root: str) -> list[str]:
    divided = ["flat /= DP_SIZE"] * average
    back = [
        "for p, part in zip(shared, flat.split([p.numel() for p in shared])):",
        "    p.grad.copy_(part.view_as(p))",
    ]
    return {
        "flat": [
            "flat = torch.cat([p.grad.flatten() for p in shared])",
            "dist.all_reduce(flat, group=DP)",
            *divided,
            *back,
        ],
        "root": [
            "for p in shared:",
            f"    dist.reduce(p.grad, dst={root}, group=DP)",
            *["    p.grad /= DP_SIZE"] * average,
            f"    dist.broadcast(p.grad, src={root}, group=DP)",
        ],
        "async": [
            "works = [dist.all_reduce(p.grad, group=DP, async_op=True) for p in shared]",
            "for work in works:",
            "    work.wait()",
            *["for p in shared:", "    p.grad.div_(DP_SIZE)"] * average,
        ],
        "gather": [
            "for p in shared:",
            "    parts = [torch.empty_like(p.grad) for _ in range(DP_SIZE)]",
            "    dist.all_gather(parts, p.grad, group=DP)",
            f"    p.grad = torch.stack(parts).{'mean' if average else 'sum'}(0)",
        ],
        "zero": [
            "flat = torch.cat([p.grad.flatten() for p in shared])",
            "size = len(flat)",
            "flat = F.pad(flat, (0, -size % DP_SIZE))",
            "own = flat.new_empty(len(flat) // DP_SIZE)",
            "dist.reduce_scatter_tensor(own, flat, group=DP)",
            *["own /= DP_SIZE"] * average,
            "dist.all_gather_into_tensor(flat, own, group=DP)",
            *[line.replace("flat.split", "flat[:size].split") for line in back],
        ],
    }[way]


def _hooks(p: Program, average: bool, partial: bool, experts: bool) -> str:
    grad = "grad" if p.sync == "hooks" else "p.grad"
    lines = ["grad = grad.clone()"] * (p.sync == "hooks")
    if partial:
        lines += ['if getattr(p, "sequence_parallel", False):', f"    dist.all_reduce({grad}, group=TP)"]
    inner = [f"dist.all_reduce({grad}, group=DP)"]
    if experts:
        inner = ['if not getattr(p, "expert", False):', *("    " + line for line in inner)]
    lines += inner + [f"{grad} /= DP_SIZE"] * average
    lines += ["return grad"] * (p.sync == "hooks")
    if p.sync == "hooks":
        head = [
            "def gradient_hook(p):",
            "    def hook(grad):",
            indent("\n".join(lines), " " * 8),
            "",
            "    return hook",
        ]
        use = ["for p in model.parameters():", "    p.register_hook(gradient_hook(p))"]
    else:
        head = ["def hook(p):", indent("\n".join(lines), "    ")]
        use = ["for p in model.parameters():", "    p.register_post_accumulate_grad_hook(hook)"]
    return "\n".join([*head, "", "", *use])


def clipped(p: Program) -> str:
    """What clips gradients of which ranks have parts; "" where torch's own does."""
    cut = p.embedding == "cut" or any("cut(" in PIECES[x.piece].text for x in p.pieces)
    experts = any(x.piece == "Experts" for x in p.pieces)
    if not p.clip or not (cut or experts):
        return ""
    lines = ["held = [p for p in model.parameters() if p.grad is not None]"]
    kinds = [("tensor_parallel", "TP")] * cut + [("expert", "DP")] * experts
    rest = " and ".join(f'not hasattr(p, "{kind}")' for kind, _ in kinds)
    lines.append(f"total = sum(p.grad.square().sum() for p in held if {rest})")
    for kind, group in kinds:
        name = "shards" if kind == "tensor_parallel" else "experts"
        lines.append(
            f'{name} = sum((p.grad.square().sum() for p in held if hasattr(p, "{kind}")), torch.zeros(()))'
        )
        lines.append(f"dist.all_reduce({name}, group={group})")
        lines.append(f"total = total + {name}")
    lines += [
        "scale = torch.clamp(max_norm / (total.sqrt() + 1e-6), max=1.0)",
        "for p in held:",
        "    p.grad.mul_(scale)",
    ]
    return "def clip_gradients(max_norm):\n" + indent("\n".join(lines), "    ")
