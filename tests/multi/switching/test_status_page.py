"""The status page of `torchrelay serve` in a browser."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from serving import get
from torchrelay.switching import Client

# The first test of the file starts three processes that import torch: minutes where many others
# run.
pytestmark = pytest.mark.timeout(400)


# The status page in a frame as wide as a phone, whose width is then written to the document.
PHONE = """<!doctype html><meta charset="utf-8"><body>
<iframe src="/page" style="width: 390px; height: 844px; border: 0"></iframe>
<script>
setTimeout(() => {
  const page = frames[0].document.documentElement;
  document.body.dataset.width = page.scrollWidth;
  document.body.dataset.rows = frames[0].document.querySelectorAll("#switches td").length;
  document.body.dataset.font = frames[0].getComputedStyle(frames[0].document.body).fontSize;
}, 3000);
</script>"""


@contextlib.contextmanager
def phone(url: str) -> Iterator[str]:
    """Serve `PHONE`, and the status page of `url` as /page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {"/": lambda: (200, PHONE.encode()), "/page": lambda: get(url, "/")}
            code, body = pages.get(self.path, lambda: get(url, self.path))()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{proxy.server_port}/"
        proxy.shutdown()
        thread.join()


@pytest.fixture
def show(tmp_path: Path) -> Callable[[str], str]:
    """Return a page as a browser without internet shows it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=5000",
        "--dump-dom",
    ]

    def run(page: str) -> str:
        done = subprocess.run(
            [*command, page], capture_output=True, text=True, check=False, timeout=110
        )
        assert "<body" in done.stdout, done.stderr[-2000:]
        return done.stdout

    return run


def test_the_status_page_in_a_browser(url: str, show: Callable[[str], str]) -> None:
    source = get(url, "/")[1].replace(b"http://www.w3.org/2000/svg", b"")
    assert b"http" not in source, "no external resources"
    with Client(url, timeout_s=100) as client:
        client.infer("chain", {"x": torch.ones(1, 64)})
    page = show(url)
    assert "requests served" in page and "<td>chain</td>" in page and "<rect" in page
    assert '<div id="lost" role="alert"></div>' in page, (
        "the page reports that the server does not answer"
    )


def test_the_status_page_fits_a_phone(url: str, show: Callable[[str], str]) -> None:
    with Client(url, timeout_s=100) as client:
        client.infer("chain", {"x": torch.ones(1, 64)})
    with phone(url) as address:
        page = show(address)
    found = dict(re.findall(r'data-(\w+)="(\d+)', page))
    assert int(found["rows"]) > 0, "the page was measured before it showed anything"
    assert int(found["width"]) <= 390, "the page scrolls sideways"
    assert int(found["font"]) >= 14
