"""Other libraries with their differentiable collectives replaced by gradmesh: `python -m tools.replaced --help`."""
