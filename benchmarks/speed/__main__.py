"""`python -m benchmarks.speed`."""

from benchmarks.speed.command import speed

speed()
