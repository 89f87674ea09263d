"""The checks of an audit: each file has one group of kinds.

A check is a function of the `Case` that it is to look at, and yields findings. It is told in `audit.CHECKS`.
"""
