"""Random training scripts, each proven right, and faults put into them, against `gradmesh check`."""
