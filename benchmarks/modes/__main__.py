"""`python -m benchmarks.modes`."""

from benchmarks.modes.command import modes

modes()
