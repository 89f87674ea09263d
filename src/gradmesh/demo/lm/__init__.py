"""`gradmesh demo lm`: a character-level language model with data, sequence and tensor parallelism.

`model` has the dense model in plain torch, its conversion and the training loop; `job` trains on one process and on
ranks; `report` shows the differences.
"""
