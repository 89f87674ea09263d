"""The environment variables: read when they are needed, and an error there and then when they cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

import gradmesh as gm
from gradmesh._util.environment import CHECK, RECYCLE, SHM_CHUNK, VARIABLES, Variable
from tests.forking import Forking

UNUSABLE = {
    "GRADMESH_CHECK": "yes",
    "GRADMESH_HANG": "soon",
    "GRADMESH_HOST": "two words",
    "GRADMESH_RECYCLE": "-1",
    "GRADMESH_SHM_CHUNK": "12345",
    "GRADMESH_SHM_NATIVE": "2",
    "GRADMESH_TRACEBACK": "0",
}


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_invalid_value_raises_with_the_valid_ones(
    variable: Variable[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, UNUSABLE[variable.name])
    with pytest.raises(gm.ArgumentError, match=variable.name) as caught:
        variable.read()
    assert variable.expected in str(caught.value)
    assert UNUSABLE[variable.name] in str(caught.value)


def test_a_value_is_kept_and_read_anew_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = Variable("GRADMESH_TEST", "5", "a number", "nothing", int)
    assert variable.value() == 5
    monkeypatch.setenv("GRADMESH_TEST", "7")
    assert (variable.value(), variable.read()) == (5, 7)
    variable.forget()
    assert variable.value() == 7


def test_unset_variable_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    assert (CHECK.read(), RECYCLE.read(), SHM_CHUNK.read()) == (True, 512 << 20, 1 << 20)


def test_importing_reads_none_and_the_first_use_of_an_unusable_one_names_it(forking: Forking) -> None:
    code = (
        "import torch, gradmesh as gm\n"
        "gm.init('gloo')\n"
        "try:\n"
        "    gm.replicate(torch.zeros(1 << 21))\n"
        "except gm.ArgumentError as error:\n"
        "    print(error)\n"
    )
    done = forking.run(code, environment=UNUSABLE)
    assert done.returncode == 0, done.stderr
    assert "invalid value of the environment variable GRADMESH_RECYCLE" in done.stdout
