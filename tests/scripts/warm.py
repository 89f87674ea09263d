"""What torch imports when an optimizer is first used, done once in the server that ranks are forked from."""

import torch

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).zero_grad()
