"""Programs in processes forked from one that has imported torch and its compiler, and nothing of gradmesh.

A new interpreter takes three seconds of CPU time to import torch. A program that is about an import of gradmesh does
not need one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

_SERVER = """
import atexit, json, os, sys, tempfile, types
import torch._dynamo
import torch._functorch.aot_autograd
import torch._subclasses
import torch.fx.experimental.proxy_tensor
import torch.overrides
import torch.utils.checkpoint

assert not any(name.split(".")[0] == "gradmesh" for name in sys.modules)

def run(program, arguments, environment):
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if not isinstance(stop.code, int | None):
            print(stop.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status

for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os._exit(run(*json.loads(line)))
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        print(json.dumps([os.waitstatus_to_exitcode(status), out.read(), err.read()]), flush=True)
"""


class Forking:
    """The process that forks, started with the first program."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(self, program: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
        """Run a program; its `returncode`, `stdout` and `stderr`."""
        if self._server is None:
            command = [sys.executable, "-c", _SERVER]
            self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([program, arguments, dict(environment or {})]) + "\n")
        self._server.stdin.flush()
        status, out, err = json.loads(self._server.stdout.readline())
        return SimpleNamespace(returncode=status, stdout=out, stderr=err)

    def close(self) -> None:
        """End it."""
        if self._server is not None:
            self._server.communicate()
            self._server = None
