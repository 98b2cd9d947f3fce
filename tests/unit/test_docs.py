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


def test_manifests_of_kubernetes_are_what_the_code_needs() -> None:
    yaml = pytest.importorskip("yaml")
    page = (ROOT / "docs" / "launching.md").read_text()
    documents = [
        document
        for _, language, text in FENCE.findall(page)
        if language == "yaml"
        for document in yaml.safe_load_all(text)
    ]
    of_kind = {document.get("kind"): document for document in documents}
    assert {kind: one["apiVersion"] for kind, one in of_kind.items() if kind} == {
        "PyTorchJob": "kubeflow.org/v1",
        "TrainJob": "trainer.kubeflow.org/v1alpha1",
        "NetworkPolicy": "networking.k8s.io/v1",
        "Service": "v1",
    }
    replicas = of_kind["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1  # it has the store, at MASTER_ADDR
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]
    assert of_kind["Service"]["spec"]["clusterIP"] == "None"  # a name for each pod
    policy = of_kind["NetworkPolicy"]
    (rule,) = policy["spec"]["ingress"]
    assert rule == {"from": [{"podSelector": policy["spec"]["podSelector"]}]}  # and thus all ports

    pod = of_kind[None]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    (variable,), (mount,) = container["env"], container["volumeMounts"]
    assert variable["name"] in (ROOT / "docs" / "settings.md").read_text()
    assert Path(variable["value"]).parent == Path(mount["mountPath"])
    assert volume["secret"]["defaultMode"] == 0o440  # with fsGroup: tests/unit/test_transport.py
    assert pod["securityContext"]["fsGroup"] and mount["name"] == volume["name"]


def test_what_is_installed_by_name_is_what_the_extras_bring() -> None:
    """torchrelay itself is installed from a clone: it is on no index."""
    project = (ROOT / "pyproject.toml").read_text()
    extras = project[project.index("[project.optional-dependencies]") : project.index("dev = [")]
    for page in PAGES:
        for line in re.findall(r"pip install ([^`#;|\n]+)", page.read_text()):
            for name in re.findall(r"(?<![\w'-])[a-z][\w-]*", line):
                known = name != "torchrelay" and re.search(rf"\b{name}\b", extras)
                assert known, f"{page.name}: pip install {line}"


def test_where_a_page_runs_the_command_its_extras_bring_it() -> None:
    project = (ROOT / "pyproject.toml").read_text()

    def brought_by(extras: str) -> set[str]:
        names = set(extras.split(","))
        for name in extras.split(","):
            for more in re.findall(rf'^{name} = .*"torchrelay\[([\w,]+)\]"', project, re.MULTILINE):
                names |= brought_by(more)
        return names

    for page in PAGES:
        text = page.read_text()
        if re.search(r"^(?:\$ )?torchrelay \w", text, re.MULTILINE):
            for extras in re.findall(r"^(?:\$ )?pip install '\.\[([\w,]+)\]'", text, re.MULTILINE):
                assert "cli" in brought_by(extras), f"{page.name}: pip install '.[{extras}]'"


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
    # with --quiet, no warning would be an error
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
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


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Print nothing: the browser is ended while it still loads."""


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Handler, directory=str(folder))
    with _Server(("127.0.0.1", 0), handler) as server:
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
