"""What a release is checked for."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

import gradmesh as gm
from tools import release


def test_a_version_that_is_not_dated_or_cited_is_named(tmp_path: Path) -> None:
    changes, citation = tmp_path / "CHANGELOG.md", tmp_path / "CITATION.cff"
    changes.write_text(f"# Changelog\n\n## {gm.__version__} (unreleased)\n")
    citation.write_text("title: x\nversion: 0.0.7\nlicense: MIT\n")
    assert len(list(release.disagreements(tmp_path))) == 2
    changes.write_text(f"# Changelog\n\n## {gm.__version__} (2026-12-01)\n")
    citation.write_text(f"title: x\nversion: {gm.__version__}\nlicense: MIT\n")
    assert list(release.disagreements(tmp_path)) == []


def test_the_citation_has_the_version_of_the_package() -> None:
    assert [text for text in release.disagreements() if "CITATION" in text] == []


def test_a_file_that_is_missing_or_does_not_belong_there_is_named(tmp_path: Path) -> None:
    sources = [*release.ROOT.glob("src/*/**/*.py"), *release.ROOT.glob("examples/gradmesh_demos/**/*.py")]
    sdist, wheel = tmp_path / "x.tar.gz", tmp_path / "x.whl"

    def pack(without: str, more: tuple[str, ...]) -> list[str]:
        with tarfile.open(sdist, "w:gz") as tar, zipfile.ZipFile(wheel, "w") as archive:
            for file in sources:
                tar.add(file, f"gradmesh-0/{file.relative_to(release.ROOT)}")
                if file.name != without:
                    archive.write(file, Path(*file.relative_to(release.ROOT).parts[1:]))
            for name in more:
                archive.writestr(name, "")
        return list(release.omissions(sdist, wheel))

    pages = ("gradmesh/py.typed", "gradmesh/pages/errors/MismatchError.md")
    assert pack("", pages) == []
    assert pack("loss_scaling.py", (*pages, "tests/conftest.py")) == [
        "x.whl lacks gradmesh/loss_scaling.py",
        "x.whl has tests/conftest.py",
    ]
    assert pack("", ()) == [f"x.whl lacks {name}" for name in pages]


def test_without_its_packages_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "find_spec", lambda _: None)
    assert release.main(["build/release"]) == 2
    assert "pip install 'gradmesh[release]'" in capsys.readouterr().out
