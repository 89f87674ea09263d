"""What the program calls its parameters: the modules that it calls, and where in them a parameter is."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["Modules"]

_WRAPPERS = ("DistributedDataParallel", "OptimizedModule", "DataParallel")
"""Modules around a module, whose names would only stand before those of its parameters."""


class Modules:
    """The modules that are called, from the outermost; a context."""

    def __init__(self) -> None:
        self._stack: list[nn.Module] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Modules:
        self._hooks = [
            register_module_forward_pre_hook(self._enters),
            register_module_forward_hook(self._leaves, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enters(self, module: nn.Module, _: Any) -> None:
        if not self._stack and not any(root() is module for root in self._roots):
            self._roots.append(weakref.ref(module))
        self._stack.append(module)

    def _leaves(self, module: nn.Module, _: Any, __: Any) -> None:
        while self._stack and self._stack.pop() is not module:
            pass

    def roots(self) -> list[nn.Module]:
        """The outermost modules that were called and still exist, without those that are a part of another."""
        alive = [module for root in self._roots if (module := root()) is not None]
        parts = {id(part) for module in alive for part in module.modules() if part is not module}
        return [module for module in alive if id(module) not in parts]

    def names(self) -> dict[int, str]:
        """The name of each parameter, by its identity."""
        found: dict[int, str] = {}
        for label, module in self._labelled():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                found.setdefault(id(parameter), label + name)
        return found

    def parameters(self) -> list[Tensor]:
        """All parameters."""
        return [parameter for module in self.roots() for parameter in module.parameters()]

    def buffers(self) -> dict[str, Tensor]:
        """Floating-point buffers, by their names."""
        return {
            label + name: buffer
            for label, module in self._labelled()
            for name, buffer in module.named_buffers()
            if buffer.is_floating_point() and type(buffer) is Tensor
        }

    def frozen(self) -> dict[str, Tensor]:
        """Parameters that take no gradient, by their names."""
        return {
            label + name: parameter
            for label, module in self._labelled()
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad and type(parameter) is nn.Parameter
        }

    def name_of(self, leaf: Tensor) -> str:
        """The name of a parameter that an operator has just met: of what its module holds at this moment."""
        for module in reversed(self._stack):
            for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter is leaf:
                    return self._path(module) + own
        return self.names().get(id(leaf), "")

    def averaging(self) -> tuple[int, ...]:
        """The ranks over which a DistributedDataParallel averages gradients; () without one."""
        for module in self.roots():
            for part in module.modules():
                if isinstance(part, nn.parallel.DistributedDataParallel):
                    return tuple(torch.distributed.get_process_group_ranks(part.process_group))
        return ()

    def _path(self, wanted: nn.Module) -> str:
        for label, module in self._labelled():
            for name, part in module.named_modules():
                if part is wanted:
                    return f"{label}{name}." if name else label
        return ""

    def _labelled(self) -> list[tuple[str, nn.Module]]:
        bare = []
        for module in self.roots():
            while type(module).__name__ in _WRAPPERS:
                module = next(iter(module.children()))
            bare.append(module)
        if len(bare) == 1:
            return [("", bare[0])]
        return [(f"{type(module).__name__}{at}.", module) for at, module in enumerate(bare)]
