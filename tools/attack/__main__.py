"""`python -m tools.attack`."""

import sys

import torch

from tools.attack.command import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
