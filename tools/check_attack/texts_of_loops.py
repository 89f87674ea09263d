"""The text of what a program trains with: its optimizer, data, loss, and the loop."""

from __future__ import annotations

import re
from textwrap import indent

from tools.check_attack.programs import SHARDED, Program
from tools.check_attack.texts_of_gradients import clipped, sent_back, synchronised

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
