"""Random distributed programs, each compared with a dense run of the same program in one process.

`programs` says what a program is and prints it as Python; `draw` draws one; `dense` runs it without gradmesh, with all
ranks' tensors side by side; `run` runs it on ranks and compares; `shrink` makes a failing one small.
"""
