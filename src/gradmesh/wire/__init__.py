"""How bytes travel between the ranks of an axis."""
