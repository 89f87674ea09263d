"""What overlap hides, measured: two programs to copy from, on a wire with a delay and without.

`chain` and `ring` are the programs; `measure` runs a step of one in each of the ways that are compared and takes the
times on ranks of a backend.
"""
