"""gradmesh may be imported, and its names first used, inside of any mode of torch: it keeps plain tensors.

Each case is a separate process. It imports torch, and gradmesh too in half of the cases; enters a mode, imports in it
what was not imported yet, leaves the mode, and then differentiates in every way. The processes are forked from one that
has imported torch with its compiler, which takes most of the time; one case is a new interpreter, without the compiler.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.forking import Forking
from tests.seldom import seldom

_MODES = {
    "a Hessian": "torch.func.hessian(importing)(torch.ones(3))",
    "inference mode": "with torch.inference_mode(): importing(torch.ones(3))",
    "fake tensors": "with FakeTensorMode(): importing(torch.ones(3))",
    "a mode that returns subclasses": "with Subclasses(): importing(torch.ones(3))",
    "a default device without values": "with torch.device('meta'): importing(torch.ones(3))",
    "make_fx": "make_fx(importing)(torch.ones(3))",
}

_PROGRAM = """
import os, torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

class Subclass(torch.Tensor):
    pass

class Subclasses(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {{}}))
        return out.as_subclass(Subclass) if type(out) is torch.Tensor else out

def importing(x):
    import gradmesh, gradmesh.nn
    for name in gradmesh.__all__:
        getattr(gradmesh, name)
    return x.square().sum()

{before}
{mode}
import gradmesh as gm
gm.init()

def cube(x):
    return (gm.all_gather(x) ** 3).sum()

def leaf():
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

def of(loss, x):
    return torch.autograd.grad(loss, x, create_graph=True)[0]

three, six = [3.0, 12.0, 27.0], [6.0, 12.0, 18.0]
x = leaf()
assert of(cube(x), x).tolist() == three
assert of(of(cube(x), x).sum(), x).tolist() == six
assert torch.func.hessian(cube)(x.detach()).diagonal().tolist() == six
assert torch.func.jvp(torch.func.grad(cube), (x.detach(),), (torch.ones(3),))[1].tolist() == six
assert torch.vmap(torch.func.grad(cube))(x.detach()[None]).tolist() == [three]
assert of((gm.all_gather(x, async_op=True).wait() ** 3).sum(), x).tolist() == three
with gm.ordered():
    assert gm.grad(checkpoint(cube, x, use_reentrant=False), [x])[0].tolist() == three
with gm.typed():
    assert of(cube(gm.scale_gradient(x, 2)), x).tolist() == [2 * each for each in three]
assert of(gm.objective(cube(x)), x).tolist() == three
compiled = torch.compile(lambda x: cube(x) + gm.broadcast(x.detach()).sum(), backend="aot_eager", fullgraph=True)
assert of(compiled(x), x).tolist() == three
print("every derivative is right")
"""


@pytest.mark.parametrize("before", ["", "import gradmesh"], ids=["import", "first use"])
@pytest.mark.parametrize("mode", seldom(_MODES, ["a Hessian", "fake tensors"]))
def test_an_import_inside_a_mode_leaves_nothing_of_it_behind(
    mode: str, before: str, forking: Forking
) -> None:
    done = forking.run(_PROGRAM.format(mode=_MODES[mode], before=before))
    assert (done.returncode, done.stdout) == (0, "every derivative is right\n"), done.stderr


def test_an_import_inside_a_mode_of_a_new_interpreter_leaves_nothing_of_it_behind() -> None:
    program = _PROGRAM.format(mode=_MODES["inference mode"], before="")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "every derivative is right" in done.stdout


def test_layer_caches_no_fake_tensor(forking: Forking) -> None:
    program = """
import torch
from torch._subclasses import FakeTensorMode
import gradmesh as gm
from gradmesh.nn.fields import interpolate
gm.init()
with FakeTensorMode():
    assert interpolate(torch.zeros(1, 1, 4), 8, mode="linear").shape == (1, 1, 8)
with torch.device("meta"):
    assert interpolate(torch.zeros(1, 1, 5), 8, mode="linear").shape == (1, 1, 8)
x = torch.arange(4.0).view(1, 1, 4)
assert torch.equal(interpolate(x, 8, mode="linear"), torch.nn.functional.interpolate(x, 8, mode="linear"))
print("the same values")
"""
    done = forking.run(program)
    assert "the same values" in done.stdout, done.stderr[-2000:]
