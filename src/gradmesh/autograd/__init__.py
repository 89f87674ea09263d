"""How ops are differentiated: at once, asynchronously, in order, deferred to the end of a step."""
