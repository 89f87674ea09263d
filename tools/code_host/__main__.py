"""Draw what a code host shows of a SARIF file: check some scripts, and open what was found in Azure DevOps' own viewer.

$ python -m tools.report docs/check-code-host.svg      # needs npm, and Chromium
"""

from __future__ import annotations

import base64
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
PAGE = """<!doctype html><meta charset="utf-8"><title>found</title>
<style>body {{ font-family: sans-serif; margin: 0 }} :root {{ {colors} }}</style>
<div id="app"></div><script src="view.js"></script>"""
# The viewer takes its colours from these properties: a page that shows it sets them for its own theme.
_PALE, _DARK = "255, 255, 255", "32, 32, 32"
_GREYS = {
    "0": _DARK,
    "2": "40, 40, 40",
    "4": "46, 46, 46",
    "8": "58, 58, 58",
    "20": "90, 90, 90",
    "80": "230, 230, 230",
}
THEMES = {
    "light": "",
    "dark": f"""color-scheme: dark; --background-color: rgb(24, 24, 24); --callout-background-color: rgb({_DARK});
    --text-primary-color: rgba({_PALE}, .9); --text-secondary-color: rgba({_PALE}, .65);
    --text-disabled-color: rgba({_PALE}, .4); --component-grid-cell-bottom-border-color: rgba({_PALE}, .1);
    --component-grid-row-hover-color: rgba({_PALE}, .03); --communication-foreground: rgb(110, 180, 240);"""
    + "".join(f"--palette-neutral-{step}: {grey};" for step, grey in _GREYS.items())
    + "".join(
        f"--palette-black-alpha-{part}: rgba({_PALE}, .{part:02d});" for part in (2, 4, 6, 10, 20, 30, 60)
    ),
}
SIZE = 1280, 640
PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="img">
<title>Findings by rule, with the line and the fix</title>
<style>.dark {{ display: none }}
@media (prefers-color-scheme: dark) {{ .light {{ display: none }} .dark {{ display: inline }} }}</style>
{2}
</svg>
"""
FONTS = [f"--loader:.{kind}=dataurl" for kind in ("woff", "woff2", "ttf", "eot", "svg", "png")]
BROWSER = (
    "chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    f"--disable-sync --hide-scrollbars --allow-file-access-from-files --window-size={SIZE[0]},{SIZE[1]} "
    "--virtual-time-budget=4000"
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
    """Bundle the viewer around the log, and put a picture of it in each theme into one file."""
    here = Path(__file__).parent
    images = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(*command: str) -> None:
            subprocess.run(command, cwd=folder, check=True, stderr=subprocess.DEVNULL)

        for file in (here / "package.json", here / "view.jsx"):
            shutil.copy(file, folder)
        (folder / "found.sarif.json").write_text(json.dumps(log))
        run("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent")
        run("npx", "esbuild", "view.jsx", "--bundle", "--outfile=view.js", "--log-level=error", *FONTS)
        for theme, colors in THEMES.items():
            (folder / f"{theme}.html").write_text(PAGE.format(colors=colors))
            run(
                *BROWSER.split(),
                f"--user-data-dir={folder}/profile",
                "--screenshot=view.png",
                f"{theme}.html",
            )
            data = base64.b64encode((folder / "view.png").read_bytes()).decode()
            images.append(
                f'<image class="{theme}" width="100%" height="100%" href="data:image/png;base64,{data}"/>'
            )
    to.write_text(PICTURE.format(*SIZE, "\n".join(images)))


def main(arguments: Sequence[str], into: Path) -> int:
    """Draw it."""
    draw(found(SHOWN), into)
    return 0
