"""The documentation site builds without a warning, its links lead somewhere, and pages fit a phone."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import gradmesh as gm
from gradmesh import errors
from tests.site_browser import BROWSER, dom_of, seen, served, widths

ROOT = Path(__file__).parent.parent

KINDS = {
    "index": "index.html",
    "how-to": "debugging.html",
    "pictures in text": "types.html",
    "all pictures": "pictures/README.html",
    "tutorial": "tutorials/clip.html",
    "api": "api/verbs.html",
    "long tables": "reports/operators.html",
    "measured": "reports/bench.html",
    "rule": "rules/GM105.html",
    "error": "errors/MismatchError.html",
    "search": "search.html",
}
"""A page of each kind."""

HEAVIEST_PAGE = 600_000
"""Bytes of a page with its pictures, beside what all pages share."""
SHARED = 600_000
"""Bytes of style sheets, scripts and fonts, which a browser keeps."""

pytestmark = pytest.mark.slow  # what is quick about the site is in test_site_sources.py

needs_sphinx = pytest.mark.skipif(
    not all(map(find_spec, ("sphinx", "furo", "myst_nb"))), reason="needs pip install '.[docs]'"
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make site` builds it, with no way to any network."""
    folder = tmp_path_factory.mktemp("site")
    written = re.search(r"python (-m sphinx .*) build/site", (ROOT / "Makefile").read_text())
    assert written
    command = [sys.executable, *written[1].split(), str(folder)]
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **nowhere})
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served(site) as found:
        yield found


def pages(site: Path) -> dict[str, str]:
    return {
        str(path.relative_to(site)): path.read_text()
        for path in site.rglob("*.html")
        if "_static" not in path.parts
    }


@needs_sphinx
def test_no_link_within_the_site_is_dead(site: Path) -> None:
    texts = pages(site)
    anchors = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in texts.items()}
    dead = []
    for name, text in texts.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or name in ("genindex.html", "search.html"):
                continue
            target = (
                os.path.normpath(os.path.join(os.path.dirname(name), unquote(parts.path)))
                if parts.path
                else name
            )
            wanted = unquote(parts.fragment)
            there = (site / target).exists()
            if not there or (wanted and wanted not in anchors.get(target, {wanted})):
                dead.append((name, link))
    assert not dead
    assert len(texts) > 60


@needs_sphinx
def test_the_site_asks_no_other_machine_for_anything(site: Path) -> None:
    """Links lead elsewhere; scripts, styles, fonts and pictures do not."""
    for name, text in pages(site).items():
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]*\bsrc="(https?:[^"]+)"', text)
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preload|icon)"[^>]*href="(https?:[^"]+)"', text)
        assert not loaded, name


@needs_sphinx
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    reference = "".join(text for name, text in pages(site).items() if name.startswith("api/"))
    documented = set(re.findall(r'id="gradmesh\.([\w.]+)"', reference))
    short = {name.rsplit(".", 1)[-1] for name in documented}
    missing = [name for name in gm.__all__ if name not in short and name not in "VRIP"]
    for package in ("nn", "verify", "nn.graph", "nn.fields", "nn.tensor", "nn.contrastive", "nn.attention"):
        module = importlib.import_module(f"gradmesh.{package}")
        missing += [
            n for n in module.__all__ if n not in short and not hasattr(getattr(module, n), "__path__")
        ]
    assert set(missing) <= {"sequence"}


@needs_sphinx
def test_names_of_other_projects_are_linked_and_none_is_kept_for_nothing(site: Path) -> None:
    linked = set()
    for text in pages(site).values():
        linked |= set(re.findall(r'href="https://docs\.(?:pytorch|python)\.org/[^"]*#([\w.]+)"', text))
    lines = (ROOT / "website" / "objects.txt").read_text().splitlines()
    assert {line.split()[0] for line in lines if not line.startswith("#")} == linked


@needs_sphinx
def test_every_error_has_a_page(site: Path) -> None:
    for name in errors.__all__:
        if name != "message":
            assert (site / "errors" / f"{name}.html").exists(), name


@needs_sphinx
def test_pages_are_light_enough_for_a_phone(site: Path) -> None:
    heavy = {}
    for name, text in pages(site).items():
        pictures = {
            os.path.normpath(os.path.join(os.path.dirname(name), each))
            for each in re.findall(r'<img[^>]*src="([^"]+)"', text)
        }
        weight = len(text.encode()) + sum(
            (site / each).stat().st_size for each in pictures if (site / each).exists()
        )
        if weight > HEAVIEST_PAGE:
            heavy[name] = weight
    assert not heavy
    index = (site / "index.html").read_text()
    shared = {link.split("?")[0] for link in re.findall(r'(?:href|src)="(_static/[^"]+)"', index)}
    assert sum((site / each).stat().st_size for each in shared) < SHARED


@needs_sphinx
@needs_browser
def test_pages_are_as_wide_as_the_window_and_their_consoles_are_clean(
    site: Path, address: str, tmp_path: Path
) -> None:
    found, said = widths(site, address, list(KINDS.values()), (390, 1280), tmp_path / "profile")
    assert len(found) == 2 * len(KINDS)
    assert [row for row in found if row[2] > row[1]] == []
    assert said == []


@needs_sphinx
@needs_browser
@pytest.mark.parametrize("width", [500, 1280])
def test_a_page_of_each_kind_can_be_seen(site: Path, address: str, tmp_path: Path, width: int) -> None:
    for kind, page in KINDS.items():
        picture = tmp_path / f"{kind}.png"
        assert seen(f"{address}/{page}", picture, (width, 1000), tmp_path / "profile") == []
        assert picture.stat().st_size > 5_000, f"{kind} is blank"


@needs_sphinx
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("context parallel", "attention"),
        ("tensor parallel", "tensor-parallel"),
        ("loss scaling", "objective"),
        ("domain decomposition", "fields"),
        ("async collectives", "overlap"),
    ],
)
def test_the_search_index_has_the_fields_terms_in_titles(site: Path, query: str, page: str) -> None:
    index = json.loads(
        (site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")")
    )
    number = index["docnames"].index(page)
    for word in query.split():
        found = [docs for stem, docs in index["titleterms"].items() if stem[:4] == word[:4]]
        assert any(number in ([docs] if isinstance(docs, int) else docs) for docs in found), word


@needs_sphinx
def test_a_wrong_address_leads_to_a_page_with_links(site: Path) -> None:
    text = (site / "404.html").read_text()
    assert "Page not found" in text
    assert 'href="reports/README.html"' in text
    assert '<base href="/">' in text  # a server shows it for addresses in folders too


@needs_sphinx
@needs_browser
def test_the_search_finds_a_verb(site: Path, address: str, tmp_path: Path) -> None:
    text, said = dom_of(f"{address}/search.html?q=halo_exchange", tmp_path / "profile")
    assert said == []
    assert "api/verbs.html" in re.search(r'id="search-results".*', text, re.DOTALL)[0]  # type: ignore[index]
