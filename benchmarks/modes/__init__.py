"""`python -m benchmarks.modes`: every verb in every autodiff mode, here and in other systems.

mode.py       how a case is differentiated: the same code for ranks and for the dense program
cell.py       one run on ranks, and the verdict on it
grid.py       all runs
report.py     the tables
command.py    the command line
"""
