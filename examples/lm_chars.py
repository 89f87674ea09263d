"""A language model of characters over data x sequence x tensor parallel ranks, which follows one process step by step.

    python examples/lm_chars.py                                  # 8 ranks as threads: 2 x 2 x 2
    torchrun --nproc-per-node 4 examples/lm_chars.py --sp 2      # 4 processes: 1 x 2 x 2

The model is plain torch (`CharModel`); the twelve lines that make it parallel are `in_parts`, beside it.
"""

from __future__ import annotations

import argparse
import os

import torch

import gradmesh as gm
from gradmesh.demo.lm.job import follow
from gradmesh.demo.lm.model import Settings, dense_model, train, words_of


def compare(settings: Settings, ranks: str, losses: list[float], whole: dict[str, torch.Tensor]) -> None:
    """Train on this process alone, and print how far the ranks were from that."""
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
    parser.add_argument("--sp", type=int, default=2, help="ranks of a sequence")
    parser.add_argument("--tp", type=int, default=2, help="ranks of a layer")
    parser.add_argument("--threads", type=int, default=8, help="ranks, where torchrun started none")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    settings = Settings(steps=args.steps)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        gm.init()
        ranks, first = gm.world_size(), gm.rank() == 0
        losses, whole, _ = follow(settings, ranks // (args.sp * args.tp), args.sp, args.tp)
        if first:
            compare(settings, f"{ranks} processes", losses, whole)
        return
    form = (settings, args.threads // (args.sp * args.tp), args.sp, args.tp)
    losses, whole, _ = gm.launch(follow, args.threads, backend="threads", args=form)[0]
    compare(settings, f"{args.threads} ranks as threads", losses, whole)


if __name__ == "__main__":
    main()
