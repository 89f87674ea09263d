"""What type checkers and help see of the verbs; which calls they take is in typed_calls.py, for `make lint`."""

from __future__ import annotations

from typing import Union, get_overloads, get_type_hints

import pytest

from gradmesh.verbs import collectives as verbs
from gradmesh.verify import Profile, Timeline


@pytest.mark.parametrize("name", [name for name in verbs.__all__ if name != "sizes"])
def test_help_shows_what_a_verb_returns(name: str) -> None:
    found = get_type_hints(getattr(verbs, name))["return"]
    declared = {get_type_hints(each)["return"] for each in get_overloads(getattr(verbs, name))}
    assert declared
    assert found == Union[tuple(declared)]  # noqa: UP007
    assert "Pending[" in str(found)
    assert "typing.Any" not in str(found)


@pytest.mark.parametrize("kind", [Profile, Timeline])
def test_the_earlier_name_of_the_start_time_works(kind: type[Profile | Timeline]) -> None:
    record = kind(begun=3)
    assert record.started == record.begun == 3
    record.started = 4
    assert record.begun == 4
