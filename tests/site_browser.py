"""The built site in a headless browser: what pages look like, how wide they are, and what they say on the console."""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["BROWSER", "console", "dom_of", "seen", "served", "widths"]

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
)

_FRAME = """<!doctype html><title>widths</title><style>body{{margin:0}}iframe{{border:0}}</style>{frames}
<script>
addEventListener("load", () => {{
  const found = [...document.querySelectorAll("iframe")].map(f => {{
    const inner = f.contentDocument.documentElement;
    return [f.dataset.page, Number(f.width), inner.scrollWidth];
  }});
  document.body.insertAdjacentHTML("beforeend", "<pre id=found></pre>");
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script>"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine; yields its address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _run(profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    command = [BROWSER, *_FLAGS, f"--user-data-dir={profile}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def console(log: str) -> list[str]:
    """What pages said on their consoles."""
    return re.findall(r":CONSOLE[:(][^\n]*", log)


def dom_of(address: str, profile: Path) -> tuple[str, list[str]]:
    """A page when its scripts have run, and what it said on the console."""
    done = _run(profile, "--dump-dom", address)
    return done.stdout, console(done.stderr)


def seen(address: str, picture: Path, size: tuple[int, int], profile: Path) -> list[str]:
    """Take a picture of a page; returns what it said on the console."""
    return console(
        _run(profile, f"--screenshot={picture}", f"--window-size={size[0]},{size[1]}", address).stderr
    )


def widths(
    root: Path, address: str, pages: Sequence[str], wide: Sequence[int], profile: Path, height: int = 900
) -> tuple[list[tuple[str, int, int]], list[str]]:
    """How wide each page is in a frame of each width, and the console. A window cannot be as narrow as a phone."""
    frames = "".join(
        f'<iframe data-page="{html.escape(page)}" src="{html.escape(page)}" width="{each}" height="{height}"></iframe>'
        for page in pages
        for each in wide
    )
    (root / "_frames.html").write_text(_FRAME.format(frames=frames))
    try:
        found, said = dom_of(f"{address}/_frames.html", profile)
    finally:
        (root / "_frames.html").unlink()
    report = re.search(r'<pre id="found">(.*?)</pre>', found, re.DOTALL)
    assert report, "the frames did not load"
    return [tuple(row) for row in json.loads(html.unescape(report[1]))], said
