"""`python -m tools.attack.jax_run`."""

import sys

import torch

from tools.attack.jax_run.command import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
