"""The docs: blocks that parse, pages that render completely, and nothing wider than a phone."""

from __future__ import annotations

import ast
import contextlib
import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> list[Any]:
    """The fenced blocks of these languages, on all pages."""
    found: list[Any] = []
    for page in PAGES:
        for indent, language, text in FENCE.findall(page.read_text()):
            if language in languages:
                code = textwrap.dedent(text) if indent else text
                found.append(pytest.param(code, id=f"{page.stem}-{len(found)}"))
    return found


@pytest.mark.parametrize("code", blocks("python"))
def test_python_parses(code: str) -> None:
    ast.parse(code)


@pytest.mark.parametrize("code", blocks("sh", "console", "bash"))
def test_shell_parses(code: str) -> None:
    if code.startswith("$ "):  # the rest is output
        lines = [line.removeprefix("$ ") for line in code.splitlines() if line.startswith("$ ")]
        code = "\n".join(lines)
    result = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("code", blocks("yaml", "toml"))
def test_configuration_parses(code: str, request: pytest.FixtureRequest) -> None:
    yaml = pytest.importorskip("yaml")
    if re.search(r"^\[|^\w+ = ", code, re.MULTILINE):
        tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
        assert tomllib.loads(code)
    else:
        assert all(list(yaml.safe_load_all(code)))


def test_every_fence_has_a_language() -> None:
    bare = [
        f"{page.name}: {text[:40]!r}"
        for page in PAGES
        for _, language, text in FENCE.findall(page.read_text())
        if not language
    ]
    assert not bare


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.timeout(400)
def test_no_markup_is_left_in_rendered_pages(site: Path) -> None:
    left = []
    pages = [page for page in site.rglob("index.html") if "assets" not in page.parts]
    assert len(pages) > 20
    for page in pages:
        body = page.read_text()
        article = body[body.index("<article") : body.index("</article>")]
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", article, flags=re.DOTALL)
        text = html.unescape(re.sub(r"<[^>]+>", "", text))
        raw = re.findall(r"^.*(?:```|^ *===|^ *\|[^\n]*\|$|:::|\]\(|\*\*).*$", text, re.MULTILINE)
        left += [f"{page.parent.name}: {line}" for line in raw]
    assert not left


_WIDTHS = """<!doctype html><title></title><script>
const pages = {pages};
const found = [];
(async () => {{
  for (const width of [390, 1280]) {{
    const frame = document.createElement("iframe");
    frame.style = `width: ${{width}}px; height: 900px; border: 0`;
    document.documentElement.append(frame);
    for (const page of pages) {{
      await new Promise(done => {{ frame.onload = done; frame.src = "/" + page; }});
      const root = frame.contentDocument.documentElement;
      if (root.scrollWidth > width) found.push(`${{page}} at ${{width}}: ${{root.scrollWidth}}`);
    }}
  }}
  await fetch("/found", {{method: "POST", body: JSON.stringify(found)}});
}})();
</script>"""


class _Handler(http.server.SimpleHTTPRequestHandler):
    found: list[str] | None = None
    done = threading.Event()

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        type(self).found = json.loads(self.rfile.read(length))
        self.send_response(204)
        self.end_headers()
        self.done.set()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.timeout(600)
def test_pages_fit_a_phone_and_a_desktop(site: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    pages = [str(page.parent.relative_to(site)) + "/" for page in site.rglob("index.html")]
    (site / "widths.html").write_text(_WIDTHS.format(pages=json.dumps(sorted(pages))))
    with _served(site) as url:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", "--remote-debugging-port=0"]
        with subprocess.Popen([*command, f"{url}/widths.html"], stderr=subprocess.DEVNULL) as shown:
            try:
                assert _Handler.done.wait(500)
            finally:
                shown.terminate()
    assert _Handler.found == []
