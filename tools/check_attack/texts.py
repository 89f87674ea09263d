"""A program as the text of a script that a person could have written."""

from __future__ import annotations

import re
from textwrap import dedent, indent

from tools.check_attack.functions import CALLS, functions
from tools.check_attack.pieces import PIECES
from tools.check_attack.programs import AVERAGED, SHARDED, Placed, Program


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


STEPS = 2


def built(p: Program) -> str:
    """The model and its optimizer, made."""
    apart = " + rank" if p.has("broadcast") else ""
    lines = [f"torch.manual_seed({p.seed}{apart})", "model = Model()"]
    if p.has("broadcast"):
        lines += ["for p in model.parameters():", "    dist.broadcast(p.data, src=0)"]
    if p.has("frozen"):
        lines.append("model.block0.requires_grad_(False)")
    if p.has("ema"):
        lines.append("ema = copy.deepcopy(model)")
    if p.sync == "ddp":
        unused = ", find_unused_parameters=True" if p.has("unused") else ""
        lines.append(f"ddp = DDP(model, process_group=DP{unused})")
    if p.sync == "fsdp2":
        lines.append("fully_shard(model)")
    lines += _parts_of(p)
    stepped = {"zero1": "own_parameters", "zero2": "own_parameters", "master": "[master]"}
    if p.sync in stepped:
        return "\n".join([*lines, f"optimizer = torch.optim.SGD({stepped[p.sync]}, lr=0.1)"])
    lines.append(
        {
            "sgd": "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
            "momentum": "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)",
            "adamw": "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)",
        }.get(p.optimizer, "lr = 0.1")
    )
    if p.has("scaler"):
        lines.append('scaler = torch.amp.GradScaler("cpu", init_scale=512.0)')
    return "\n".join(lines)


def _parts_of(p: Program) -> list[str]:
    """The part of the model that each rank's optimizer has."""
    if p.sync not in SHARDED:
        return []
    lines = ["parameters = list(model.parameters())"]
    if p.sync != "master":
        return [*lines, "own_parameters = parameters[dp_rank::DP_SIZE]"]
    return [
        *lines,
        "sizes = [p.numel() for p in parameters]",
        "flat = torch.cat([p.detach().flatten() for p in parameters])",
        "flat = F.pad(flat, (0, -len(flat) % DP_SIZE))",
        "master = nn.Parameter(flat.chunk(DP_SIZE)[dp_rank].clone())",
    ]


def batches(p: Program) -> str:
    """What draws a batch, of which each rank takes its part."""
    if p.has("uneven"):
        rows = "bounds = {1: [0, 8], 2: [0, 5, 8], 4: [0, 3, 4, 6, 8]}[DP_SIZE]\n"
        rows += "rows = slice(bounds[dp_rank], bounds[dp_rank + 1])"
    else:
        rows = "rows = slice(dp_rank * B // DP_SIZE, (dp_rank + 1) * B // DP_SIZE)"
    lines = ["data = torch.Generator().manual_seed(11)", *rows.splitlines()]
    cols = "columns = slice(tp_rank * T // TP_SIZE, (tp_rank + 1) * T // TP_SIZE)"
    if "tokens" in (p.begins, p.ends):
        lines.append(cols)
    x = (
        "torch.randn(B, T, 3, generator=data)"
        if p.embedding == "linear"
        else "torch.randint(V, (B, T), generator=data)"
    )
    own_x = "x[rows, columns]" if p.begins == "tokens" else "x[rows]"
    own_y = "y[rows, columns]" if p.ends == "tokens" else "y[rows]"
    body = [f"x, y = {x}, torch.randint(V, (B, T), generator=data)"]
    if p.loss == "masked":
        body.append("mask = (torch.rand(B, T, generator=data) < 0.7).float()")
        body.append(f"return {own_x}, {own_y}, {own_y.replace('y', 'mask', 1)}")
    else:
        body.append(f"return {own_x}, {own_y}")
    return "\n".join(lines) + "\n\n\ndef batch():\n" + indent("\n".join(body), "    ")


def losses_of(p: Program) -> str:
    """What computes the loss of each token."""
    model = "ddp" if p.sync == "ddp" else "model"
    body = [f"out, h = {model}(x)" if p.has("aux") else f"out = {model}(x)"]
    body.append('losses = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")')
    if p.has("aux") and p.has("twice"):
        body.append("return losses, 0.1 * h.square().mean(-1).flatten()")
    elif p.has("aux"):
        body.append("return losses + 0.1 * h.square().mean(-1).flatten()")
    else:
        body.append("return losses")
    return "def losses_of(x, y):\n" + indent("\n".join(body), "    ")


def _number(p: Program, losses: str) -> str:
    """The loss, made of those of the tokens."""
    tp = " / TP_SIZE" if p.ends == "tokens" else ""
    micro = f" / {p.micro}" if p.micro > 1 and not p.has("late_division") else ""
    return {
        "mean": f"{losses}.mean(){tp}{micro}",
        "count": f"{losses}.sum() / (B * T)",
        "masked": f"({losses} * mask.flatten()).sum() / count",
        "sum": f"{losses}.sum()",
        "scaled_up": f"{losses}.sum() / (B * T) * DP_SIZE"
        + (f" * {p.micro}" if p.has("late_division") else ""),
        "shared": f"GatherWhole.apply({losses}, 0, DP).mean(){micro}",
        "reduced": f"distnn.all_reduce({losses}.sum(), group=DP) / (B * T)"
        + (f" * {p.micro}" if p.has("late_division") else ""),
    }[p.loss]


def loop(p: Program) -> str:
    """The steps."""
    mask = ", mask" if p.loss == "masked" else ""
    lines = [f"x, y{mask} = batch()"]
    if p.loss == "masked":
        lines += [
            "count = mask.sum()",
            f"dist.all_reduce(count{', group=DP' if p.ends == 'whole' and p.dp > 1 else ''})",
        ]
        if p.ends == "whole" and p.dp == 1:
            lines.pop()
    if p.random:
        lines.append(f"torch.manual_seed({p.seed} + 100 * step + dp_rank)")
    if p.optimizer.startswith("manual"):
        lines += ["for p in model.parameters():", "    p.grad = None"]
    elif p.sync in SHARDED:
        lines.append("model.zero_grad()")
    else:
        lines.append("optimizer.zero_grad()")
    inner = _backward(p)
    if p.micro > 1:
        names = "x, y, mask" if mask else "x, y"
        own = "xs, ys, masks" if mask else "xs, ys"
        inner = [re.sub(r"\bmask\b", "masks", line.replace("(x, y)", "(xs, ys)")) for line in inner]
        zipped = ", ".join(f"{name}.chunk({p.micro})" for name in names.split(", "))
        if p.sync == "ddp":
            lines.append(f"for at, ({own}) in enumerate(zip({zipped})):")
            lines.append(f"    ddp.require_backward_grad_sync = at == {p.micro - 1}")
        else:
            lines.append(f"for {own} in zip({zipped}):")
        lines += ["    " + line for line in inner]
    else:
        lines += inner
    if synchronised(p).startswith("def sync_gradients") or "\ndef sync_gradients" in synchronised(p):
        lines.append("sync_gradients()")
    if p.has("scaler"):
        lines.append("scaler.unscale_(optimizer)")
    if p.has("scale"):
        lines += ["for p in model.parameters():", "    if p.grad is not None:", "        p.grad /= 64.0"]
    if p.clip:
        lines.append(
            "clip_gradients(0.3)" if clipped(p) else "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)"
        )
    if p.has("clip_value"):
        lines.append("torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)")
    if p.optimizer == "manual":
        lines += ["with torch.no_grad():", "    for p in model.parameters():"]
        lines += ["        if p.grad is not None:", "            p -= lr * p.grad"]
    elif p.optimizer == "manual_data":
        lines += ["for p in model.parameters():"]
        lines += ["    if p.grad is not None:", "        p.data.add_(p.grad, alpha=-lr)"]
    elif p.has("scaler"):
        lines += ["scaler.step(optimizer)", "scaler.update()"]
    else:
        lines.append("optimizer.step()")
    lines += sent_back(p)
    if p.has("ema"):
        lines += ["with torch.no_grad():", "    for slow, p in zip(ema.parameters(), model.parameters()):"]
        lines.append("        slow.lerp_(p, 0.1)")
    if p.has("eval"):
        lines += ["with torch.no_grad():", "    model(x)"]
    if p.has("log"):
        lines += ["shown = loss.detach().clone()", "dist.all_reduce(shown)", "if rank == 0:"]
        lines.append('    print(f"step {step} loss {shown.item() / world:.4f}")')
    return f"for step in range({STEPS}):\n" + indent("\n".join(lines), "    ")


def _backward(p: Program) -> list[str]:
    lines = []
    scale = "(loss * 64.0)" if p.has("scale") else "scaler.scale(loss)" if p.has("scaler") else "loss"
    if p.has("aux") and p.has("twice"):
        lines += [
            "losses, others = losses_of(x, y)",
            f"loss = {_number(p, 'losses')}",
            f"other = {_number(p, 'others')}",
        ]
        lines += [f"{scale}.backward(retain_graph=True)", f"{scale.replace('loss', 'other')}.backward()"]
        return lines
    lines += ["losses = losses_of(x, y)", f"loss = {_number(p, 'losses')}"]
    if p.has("first_rank"):
        weight = f" / {p.micro}" if p.micro > 1 else ""
        lines += ["if dp_rank == 0:", f"    loss = loss + 0.1 * model.extra.square().sum(){weight}"]
    if p.sync == "asked":
        lines += ["parameters = [p for p in model.parameters() if p.requires_grad]"]
        lines += [
            f"for p, grad in zip(parameters, torch.autograd.grad({scale}, parameters)):",
            "    p.grad = grad",
        ]
    else:
        lines.append(f"{scale}.backward()")
    return lines


def text_of(program: Program) -> str:
    """The script."""
    p = program
    parts = [_begin(p), *classes(p), model_of(p), built(p), batches(p), losses_of(p)]
    parts += [synchronised(p), clipped(p), loop(p)]
    body = "\n\n\n".join(part for part in parts[1:] if part)
    used = functions(body, p.style)
    whole = (
        "\n\n\n".join(part for part in (parts[0], used, body) if part) + "\n\ndist.destroy_process_group()\n"
    )
    return _imports(whole) + "\n\n" + whole


def _imports(text: str) -> str:
    known = {
        "copy.deepcopy": "import copy",
        "torch.": "import torch",
        "dist.": "import torch.distributed as dist",
        "funcol.": "import torch.distributed._functional_collectives as funcol",
        "distnn.": "import torch.distributed.nn.functional as distnn",
        "F.": "import torch.nn.functional as F",
        "nn.": "from torch import nn",
        "init_device_mesh": "from torch.distributed.device_mesh import init_device_mesh",
        "fully_shard(": "from torch.distributed.fsdp import fully_shard",
        "DDP(": "from torch.nn.parallel import DistributedDataParallel as DDP",
        "checkpoint(": "from torch.utils.checkpoint import checkpoint",
    }
    return "\n".join(line for name, line in known.items() if re.search(rf"(?<![\w.]){re.escape(name)}", text))


def _begin(p: Program) -> str:
    lines = [
        "B, T, D, V = 8, 4, 8, 12",
        'dist.init_process_group("gloo")',
        "rank, world = dist.get_rank(), dist.get_world_size()",
    ]
    if p.tp > 1:
        lines.append(f"TP_SIZE = min({p.tp}, world)")
        lines.append("DP_SIZE = world // TP_SIZE")
        lines.append("tp_rank, dp_rank = rank % TP_SIZE, rank // TP_SIZE")
    else:
        lines.append("DP_SIZE, dp_rank = world, rank")
    if p.dp > 1 and p.tp > 1 and p.has("device_mesh"):
        lines.append('mesh = init_device_mesh("cpu", (DP_SIZE, TP_SIZE), mesh_dim_names=("dp", "tp"))')
        lines.append('DP, TP = mesh.get_group("dp"), mesh.get_group("tp")')
    elif p.dp > 1 and p.tp > 1:
        lines += [
            "for at in range(DP_SIZE):",
            "    group = dist.new_group([at * TP_SIZE + i for i in range(TP_SIZE)])",
            "    TP = group if at == dp_rank else (TP if at else None)",
            "for at in range(TP_SIZE):",
            "    group = dist.new_group([at + i * TP_SIZE for i in range(DP_SIZE)])",
            "    DP = group if at == tp_rank else (DP if at else None)",
        ]
    else:
        lines.append(f"{'DP' if p.tp == 1 else 'TP'} = dist.group.WORLD")
    return "\n".join(lines)
