"""Async collectives, started and waited for separately, forward and backward."""
