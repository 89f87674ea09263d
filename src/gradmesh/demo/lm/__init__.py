"""The job behind `gradmesh demo lm`: a language model of characters over ranks in three ways at once.

`model` has the dense model of plain torch, what makes it parallel, and the training; `job` trains it on one process
and on ranks, and `report` shows how far they are apart.
"""
