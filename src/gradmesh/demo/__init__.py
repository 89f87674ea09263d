"""The job behind `gradmesh demo`: contrastive learning of real images over ranks, and the proof of its gradients.

`contrast` is what the ranks run and what one process computes without them, `job` trains on both and compares,
`report` shows it, `extras` finds out whether what that needs is installed.
"""
