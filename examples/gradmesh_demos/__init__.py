"""`gradmesh demo`: training jobs on local ranks, compared with one process.

* `clip`: contrastive learning of images, with three all-gathers
* `lm`: a language model with data, sequence and tensor parallelism
* `fno`: a Fourier neural operator whose fields are sharded
* `forces`: an interatomic potential on partitioned graphs, with molecular dynamics
* `runner`: what they share: the command line, progress, tables and plots
"""
