"""What the site is made of is up to date: pictures, the texts of errors, names in other projects, and the tutorials."""

from __future__ import annotations

import inspect
import pydoc
import re
import runpy
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import gradmesh as gm
from gradmesh import errors
from tests.seldom import seldom
from tools import errors as texts
from tools.pictures.__main__ import files, name_of
from tools.pictures.motion import drawn, motions

ROOT = Path(__file__).parent.parent


def test_every_public_verb_is_drawn_as_the_registry_has_it() -> None:
    folder = ROOT / "docs" / "pictures"
    made = files()
    assert {path.name for path in folder.iterdir()} == set(made)
    assert [name for name, text in made.items() if (folder / name).read_text() != text] == []
    assert {name_of(row.call) for row in drawn()} < set(made)


def test_picture_shows_a_verb_and_its_adjoint() -> None:
    forward, backward = motions()["all_gather(dst=R)"]
    assert [[term.rank for cell in cells for term in cell.terms] for cells in forward.after] == [
        [0, 1, 2]
    ] * 3
    # The gradient of an R value is P: each rank's part of each row, summed where the row came from.
    assert backward.src == "P"
    assert [len(cell.terms) for cells in backward.after for cell in cells] == [3, 3, 3]
    forward, backward = motions()["all_gather(dst=I)"]
    assert [len(cell.terms) for cells in backward.after for cell in cells] == [1, 1, 1]


def test_the_pages_of_errors_have_every_text_that_the_source_has() -> None:
    made = texts.pages(texts.FOLDER)
    assert [path.name for path, text in made.items() if path.read_text() != text] == []
    assert {path.stem for path in texts.FOLDER.glob("*.md")} == {*texts.classes(), "README"}
    found = {text.problem: text.kind for text in texts.texts()}
    assert found["<name> is out of range"] == "ArgumentError"
    assert found["the ordered() block ended without join()"] == "OrderError"
    assert len(found) > 250
    for text in made.values():
        table = text.partition(texts.BEGIN)[2]
        assert not re.search(r"\.{4}|\.{3} +\.{3}|\| +\.{3}|\| *\|", table)
    assert len(texts.examples(texts.texts())) > 25


ERRORS = [kind for kind in texts.classes().values() if issubclass(kind, errors.GradmeshError)]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_errors_traceback_ends_with_its_page_and_its_text_does_not(
    kind: type[errors.GradmeshError],
) -> None:
    class OfAUser(kind):  # type: ignore[valid-type]
        pass

    for raised in (kind("gradmesh: no"), OfAUser("gradmesh: no")):
        assert str(raised) == "gradmesh: no"
        (note,) = raised.__notes__
        assert note == f"  see       gradmesh explain {kind.__name__}, or docs/errors/{kind.__name__}.md"
        assert (ROOT / note.split()[-1]).exists()
        raised.add_note("added")
        Exception.add_note(raised, "added by Python itself")
        assert raised.__notes__ == [note, "added", "added by Python itself"]


def test_the_page_is_named_by_an_error_that_came_from_a_rank(
    threads: Callable[[int], Callable[..., Any]],
) -> None:
    with pytest.raises(gm.RankError) as caught:
        threads(2)(lambda: gm.all_gather([1.0]))  # type: ignore[type-var]
    assert "docs/errors/ArgumentError.md" in caught.value.rank_traceback
    assert caught.value.__cause__ is not None
    assert len(caught.value.__cause__.__notes__) == 1


def test_names_of_other_projects_are_there() -> None:
    lines = (ROOT / "website" / "objects.txt").read_text().splitlines()
    names = [line.split() for line in lines if line and not line.startswith("#")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of torch's say that they are old
        missing = [name for name, role, _ in names if role != "option" and pydoc.locate(name) is None]
    assert missing == []
    assert all(page.split("#")[-1] == name or page.endswith(f"{name}.html") for name, _, page in names)


def test_every_page_is_on_the_way_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    trees = re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
    listed = {line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"} <= listed
    reports = (ROOT / "docs" / "reports" / "README.md").read_text()
    written = {path.name for path in (ROOT / "docs" / "reports").glob("*.md")} - {"README.md"}
    assert written == set(re.findall(r"\]\(([\w-]+\.md)\)", reports))


def test_every_public_name_has_a_place_in_the_reference() -> None:
    """The built pages are looked at in test_site."""
    text = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.rst"))
    placed = set(re.findall(r"\.\. auto(?:function|class|exception):: ([\w.]+)", text)) | set(texts.classes())
    for module in (gm, gm.verify, gm.nn, gm.nn.graph, gm.nn.fields):
        own = [name for name in module.__all__ if name not in placed and name not in gm.Type.__members__]
        assert [name for name in own if not inspect.ismodule(getattr(module, name))] == [], module.__name__


def test_every_name_that_the_reference_documents_exists() -> None:
    """The site build imports them too, but it is among the slow tests."""
    missing = []
    for path in sorted((ROOT / "docs" / "api").glob("*.rst")):
        module = ""
        for kind, name in re.findall(r"\.\. (auto\w+|currentmodule):: ([\w.]+)", path.read_text()):
            if kind in ("automodule", "currentmodule"):
                module = name
            inside = name if name.startswith("gradmesh") else f"{module}.{name}"
            missing += [(path.name, name)] if pydoc.locate(inside) is None else []
    assert missing == []


needs_jupyter = pytest.mark.skipif(
    not all(map(find_spec, ("nbclient", "nbformat", "ipykernel"))), reason="needs pip install '.[docs]'"
)


@needs_jupyter
@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    seldom(sorted(path.stem for path in (ROOT / "docs" / "tutorials").glob("*.ipynb")), ["first-gradient"]),
)
def test_tutorial_prints_the_shown_output(name: str) -> None:
    import nbformat

    from tools.notebooks import printed, run

    path = ROOT / "docs" / "tutorials" / f"{name}.ipynb"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's own
        assert printed(run(path)) == printed(nbformat.read(path, as_version=4))


@pytest.mark.skipif(not all(map(find_spec, ("sphinx", "furo"))), reason="needs pip install '.[docs]'")
@pytest.mark.parametrize(
    "urls",
    [
        {},
        {"Repository": "https://example.org/gradmesh"},
        {"Repository": "https://github.com/someone/gradmesh"},
    ],
)
def test_repository_links_come_from_the_project_file(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tomllib.loads", lambda _: {"project": {"urls": urls}})
    monkeypatch.setattr("sys.path", list(sys.path))
    options = runpy.run_path(str(ROOT / "website" / "conf.py")).get("html_theme_options", {})
    assert options.get("source_repository") == urls.get("Repository")
    assert ("edit" in options.get("top_of_page_buttons", [])) == bool(urls)
    # The theme knows the addresses of known hosts; for another one it would only warn.
    assert ("source_edit_link" in options) == ("example.org" in str(urls))
