"""A language model of characters over data x sequence x tensor parallel ranks, which follows one process step by step.

    python examples/lm_chars.py                                  # 8 ranks as threads: 2 x 2 x 2
    torchrun --nproc-per-node 4 examples/lm_chars.py --sp 2      # 4 processes: 1 x 2 x 2

The model is plain torch (`gradmesh.demo.lm.CharModel`); what makes it parallel is `in_parts` beside it, twelve lines.
"""

from __future__ import annotations

import argparse
import os

import torch

import gradmesh as gm
from gradmesh.demo.lm import Settings, dense_model, train, words_of


def follow(settings: Settings, sp: int, tp: int) -> tuple[list[float], list[float], float]:
    """On rank 0: the losses in parts and of one process, and how far the parameters are apart in the end."""
    first, dp = gm.rank() == 0, gm.world_size() // (sp * tp)
    words, text = words_of()
    dense = dense_model(len(words), settings)
    gm.mesh(dp=dp, sp=sp, tp=tp)
    own = list(train(dense, text, settings, parts=True))
    whole = gm.nn.dense_state_dict(own[-1][1])
    if not first:
        return [], [], 0.0
    alone = list(train(dense, text, settings, parts=False))
    right = alone[-1][1].state_dict()
    apart = max(float((whole[name] - right[name]).abs().max()) for name in right)
    return [loss for loss, _ in own], [loss for loss, _ in alone], apart


def report(settings: Settings, ranks: str, losses: list[float], right: list[float], apart: float) -> None:
    """Print some losses, and how far apart they are at most."""
    print(f"{ranks}, {settings.batch} x {settings.context} characters a step")
    for step in sorted({0, len(losses) // 2, len(losses) - 1}):
        print(f"step {step:>3}  loss {losses[step]:.6f}  one process {right[step]:.6f}")
    far = max(abs(a - b) for a, b in zip(losses, right, strict=True))
    print(f"losses are at most {far:.1e} apart, parameters {apart:.1e}")


def main() -> None:
    """Train, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sp", type=int, default=2, help="ranks of a sequence")
    parser.add_argument("--tp", type=int, default=2, help="ranks of a layer")
    parser.add_argument("--threads", type=int, default=8, help="ranks, where torchrun started none")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    settings = Settings(steps=args.steps)
    if "RANK" in os.environ:
        gm.init()
        found = follow(settings, args.sp, args.tp)
        if found[0]:
            report(settings, f"{os.environ['WORLD_SIZE']} processes", *found)
        return
    torch.set_num_threads(1)
    found = gm.launch(follow, args.threads, backend="threads", args=(settings, args.sp, args.tp))[0]
    report(settings, f"{args.threads} ranks as threads", *found)


if __name__ == "__main__":
    main()
