"""`python -m benchmarks.speed`: how long each collective takes, forward and backward, here and in other systems.

tasks.py        what is timed: verbs, sizes, operands, and the right results
calls.py        what a rank calls, from a system of `benchmarks.systems`
raw.py          the same from torch.distributed alone
mpi.py          the same from MPI
floor.py        the copies and sums that no implementation can avoid
contenders.py   all of these, by name and backend, and which are there
worker.py       what a rank does: check, calibrate, time, measure memory
pools.py        the ranks: processes, threads, MPI
mpi_rank.py     the main program of a rank of MPI
run.py          the round robin over pools and systems
results.py      what was measured, to JSON and back
overhead.py     what a wrapper adds to the raw call
targets.py      what is promised, and what came out
tables.py       the tables of a terminal
picture.py      the picture
page.py         the page of the docs
command.py      the command line
"""
