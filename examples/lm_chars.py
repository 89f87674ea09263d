"""A character-level language model with data, sequence and tensor parallelism, compared with one process.

    python examples/lm_chars.py                                  # 8 thread ranks: 2 x 2 x 2
    torchrun --nproc-per-node 4 examples/lm_chars.py             # 4 processes: 1 x 2 x 2

The model is plain torch (`gradmesh_demos.lm.CharModel`); `in_parts` in the same file makes it parallel in twelve
lines.
"""

from __future__ import annotations

import argparse
import os

import torch
from gradmesh_demos.lm import Settings, dense_model, follow, train, words_of

import gradmesh as gm


def compare(settings: Settings, ranks: str, losses: list[float], whole: dict[str, torch.Tensor]) -> None:
    """Train on this process only, and print the differences."""
    words, text = words_of()
    dense = dense_model(len(words), settings)
    right, state = list(train(dense, text, settings, parts=False)), dense.state_dict()
    print(f"{ranks}, {settings.batch} x {settings.context} characters a step")
    for step in sorted({0, len(losses) // 2, len(losses) - 1}):
        print(f"step {step:>3}  loss {losses[step]:.6f}  one process {right[step]:.6f}")
    far = max(abs(a - b) for a, b in zip(losses, right, strict=True))
    apart = max(float((whole[name] - state[name]).abs().max()) for name in state)
    print(f"losses are at most {far:.1e} apart, parameters {apart:.1e}")


def main() -> None:
    """Train, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="number of local ranks, without torchrun")
    parser.add_argument("--backend", default="threads", help="threads, shm or gloo")
    parser.add_argument("--sp", type=int, help="sequence parallel size; default 2 if there are 4 ranks")
    parser.add_argument("--tp", type=int, help="tensor parallel size; default 2 if there are 2 ranks")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    settings, started = Settings(steps=args.steps), "RANK" in os.environ
    torch.set_num_threads(1)
    if started:
        gm.init(args.backend if args.backend != "threads" else None)
    ranks = gm.world_size() if started else args.ranks
    tp = args.tp or 1 + (ranks % 2 == 0)
    sp = args.sp or 1 + (ranks % (2 * tp) == 0)
    form = (settings, ranks // (sp * tp), sp, tp)
    if started:
        first = gm.rank() == 0
        losses, whole, _ = follow(*form)
        if first:
            compare(settings, f"{ranks} processes", losses, whole)
        return
    losses, whole, _ = gm.launch(follow, ranks, backend=args.backend, args=form)[0]
    compare(settings, f"{ranks} ranks on {args.backend}", losses, whole)


if __name__ == "__main__":
    main()
