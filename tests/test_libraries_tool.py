"""The table of training libraries: what the page shows, and that each program is there."""

from __future__ import annotations

import json

from tools.libraries import __main__ as command


def test_each_library_has_a_release_and_a_program() -> None:
    for cell in command.cells():
        assert cell.release
        assert (command.HERE / "programs" / f"{command.PROGRAMS[cell.family][0]}.py").exists()
    assert {cell.family for cell in command.cells(["trl"])} == {"trl"}


def test_the_page_of_libraries_is_that_of_the_measurements() -> None:
    data = json.loads(command.DATA.read_text())
    assert command.PAGE.read_text() == command.page(data)
    assert {(row["family"], row["plan"]) for row in data["rows"]} == {
        (cell.family, cell.plan) for cell in command.cells()
    }


def test_a_wrong_loss_is_confirmed_beside_one_process() -> None:
    rows = json.loads(command.DATA.read_text())["rows"]
    wrong = [row for row in rows if row["verdict"] == "wrong"]
    assert wrong
    assert all(row["parity"]["wrong"] for row in wrong)
