"""Draw what a code host shows of a SARIF file: check some scripts, and open what was found in Azure DevOps' own viewer.

$ python -m tools.report docs/check-code-host.png      # needs npm, and Chromium
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradmesh as gm
from gradmesh.checker.report import sarif
from gradmesh.checker.run import Target, check_script
from tests.scripts import WRONG

SHOWN = ("sp_norm_not_summed", "clip_raw_all_gather", "batch_norm_own_statistics", "cp_loss_divided_twice")
PAGE = """<!doctype html><meta charset="utf-8"><title>found</title><link rel="stylesheet" href="view.css">
<style>body { font-family: sans-serif; margin: 0 }</style><div id="app"></div><script src="view.js"></script>"""
FONTS = [f"--loader:.{kind}=dataurl" for kind in ("woff", "woff2", "ttf", "eot", "svg", "png")]
BROWSER = (
    "chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-sync --allow-file-access-from-files --window-size=1280,520 --virtual-time-budget=4000"
)


def found(names: Sequence[str]) -> dict[str, Any]:
    """One log of what was found in these scripts."""
    logs = []
    for name in names:
        script = WRONG[name]
        verdict = check_script(Target(str(script.path)), ranks=script.ranks)
        logs.append(sarif(verdict, version=gm.__version__, base=script.path.parent))
    whole = logs[0]
    whole["runs"][0]["results"] = [result for log in logs for result in log["runs"][0]["results"]]
    return whole


def draw(log: dict[str, Any], to: Path) -> None:
    """Bundle the viewer around the log, and take a picture of it."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in (here / "package.json", here / "view.jsx"):
            shutil.copy(file, folder)
        (folder / "found.sarif.json").write_text(json.dumps(log))
        (folder / "index.html").write_text(PAGE)
        for command in (
            ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"],
            ["npx", "esbuild", "view.jsx", "--bundle", "--outfile=view.js", "--log-level=error", *FONTS],
            [*BROWSER.split(), f"--user-data-dir={folder}/profile", "--screenshot=view.png", "index.html"],
        ):
            subprocess.run(command, cwd=folder, check=True, stderr=subprocess.DEVNULL)
        shutil.copy(folder / "view.png", to)


def main(arguments: Sequence[str], into: Path) -> int:
    """Draw it."""
    draw(found(SHOWN), into)
    return 0
