"""A program as the text of a script that a person could have written."""

from __future__ import annotations

import re

from tools.check_attack.functions import functions
from tools.check_attack.programs import Program
from tools.check_attack.texts_of_gradients import clipped, synchronised
from tools.check_attack.texts_of_loops import batches, built, loop, losses_of
from tools.check_attack.texts_of_models import classes, model_of


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
