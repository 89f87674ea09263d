"""Proofs that a program's distributed gradients are right."""
