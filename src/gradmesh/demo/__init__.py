"""`gradmesh demo`: training jobs on local ranks, compared with one process.

Here: contrastive learning of images. `contrast` has the model and loss on ranks and on one process, `job` trains both
and compares them, `report` prints and plots the results.
"""
