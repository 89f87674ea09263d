"""A network on a large periodic graph that is cut over ranks: what is sent, and how far it is from one process."""
