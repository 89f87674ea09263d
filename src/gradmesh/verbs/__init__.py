"""The public functions on tensors and structures of tensors."""
