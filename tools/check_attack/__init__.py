"""Random plain training scripts, right by construction and held to it, and faults put into them, for `gradmesh check`."""
