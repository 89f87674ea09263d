"""All ranks' tapes run again in one process, as one graph of autograd in which a collective is plain arithmetic."""
