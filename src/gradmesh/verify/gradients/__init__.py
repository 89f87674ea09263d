"""Gradient checks for multi-rank programs.

`gradcheck` compares the gradients of every rank with finite differences of the objective of all ranks, and
`same_as_single` a program with the same program on a single process. `Input` declares the type of an input over the
ranks; `Shard` how a tensor is partitioned across them.

* `inputs`: the leaves of a rank's inputs, with their types and placements
* `program`: on a rank, the function with perturbed leaves, its gradients and the measurements
* `report`: the comparison of all ranks' measurements, and the result
* `calls`: the collectives of a run, and runs with one collective's gradient modified
* `diagnosis`: the cause of wrong gradients: hypotheses that predict them, and collectives whose change corrects them
"""
