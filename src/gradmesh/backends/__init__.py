"""Backends of torch.distributed; they know nothing of autograd."""
