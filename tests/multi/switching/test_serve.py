"""`torchrelay serve` as a stranger uses it: the command, a public client, raw sockets, a
browser.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

import switching_models as models
from torchrelay.cli import app
from torchrelay.errors import (
    ArgumentError,
    ModelError,
    NotFoundError,
    OperationTimeoutError,
    PeerLostError,
    UnsupportedError,
)
from torchrelay.switching import Client, _switcher
from torchrelay.switching._host import HostLink

# The first test of the file starts three processes that import torch: minutes where many others
# run.
pytestmark = pytest.mark.timeout(400)

MODELS = Path(models.__file__)
FILE = """
[server]
port = 0
arena_bytes = 4_000_000
request_bytes = 1_000_000
threads = 1
client_limit = 2
run_timeout_s = 600

[models.chain]
factory = "models.py:chain"
kwargs = { depth = 3 }
seed = 4
inputs = [{ name = "x", datatype = "FP32", shape = [-1, 64] }]

[models.mixed]
factory = "models.py:mixed"
inputs = [{ name = "tokens", datatype = "INT64", shape = [-1, -1] }]

[models.slow]
factory = "models.py:slow"
inputs = [
  { name = "x", datatype = "FP32", shape = [1, 8] },
  { name = "seconds", datatype = "FP32", shape = [] },
]

[models.faulty]
factory = "models.py:faulty"
load = false
inputs = [
  { name = "x", datatype = "FP32", shape = [1, 4] },
  { name = "what", datatype = "INT64", shape = [] },
]
"""


class Server(NamedTuple):
    """A running `torchrelay serve`."""

    url: str
    pid: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    shutil.copy(MODELS, folder / "models.py")
    (folder / "models.toml").write_text(FILE)
    command = [
        sys.executable,
        "-c",
        "from torchrelay.cli import main; main()",
        "serve",
        str(folder / "models.toml"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        for line, name in zip(lines, ("chain", "mixed", "slow"), strict=False):
            assert line.startswith(f"{name}: "), lines
        address = lines[3].split()[-1]
        yield Server(address, process.pid)
        with ThreadPoolExecutor(1) as pool:  # SIGTERM finishes what runs
            answer = pool.submit(post, address, "/v2/models/slow/infer", slow_request(1.0))
            until(lambda: bool(running(address)))
            process.send_signal(signal.SIGTERM)
            assert answer.result()[0] == 200
        assert process.wait(100) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def url(server: Server) -> str:
    return server.url


def get(url: str, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url + path, timeout=100) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def post(
    url: str, path: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    request = urllib.request.Request(url + path, body, headers or {}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=100) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def chain() -> torch.nn.Module:
    torch.manual_seed(4)
    return models.chain(depth=3).eval()


def test_our_client(url: str) -> None:
    x = torch.randn(3, 64)
    with Client(url, timeout_s=100) as client, torch.inference_mode():
        assert torch.allclose(
            client.infer("chain", {"x": x}, priority=1)["output"], chain()(x), atol=1e-6
        )
        assert set(client.infer("mixed", {"tokens": torch.ones(1, 4, dtype=torch.int64)})) == {
            "logits",
            "pooled",
        }
        ready = dict.fromkeys(("chain", "mixed", "slow"), "READY")
        assert client.models() == {**ready, "faulty": "UNAVAILABLE"}
        with pytest.raises(NotFoundError, match="no model 'none'"):
            client.infer("none", {"x": x})
        with pytest.raises(ArgumentError, match="takes the inputs x; got y"):
            client.infer("chain", {"y": x})
        with pytest.raises(OperationTimeoutError, match="missed its deadline"):
            client.infer("chain", {"x": x}, deadline_s=0.0)
        client.load("faulty")
        with pytest.raises(ModelError, match="asked to fail"):
            client.infer("faulty", {"x": torch.ones(1, 4), "what": torch.tensor(1)})
        client.unload("faulty")
        with pytest.raises(NotFoundError):
            client.unload("faulty")
        for name, message in (("none", "the models file has no model"), ("../etc/passwd", "404")):
            with pytest.raises(NotFoundError, match=message):
                client.load(name)
        assert client.metadata("chain")["outputs"] == [
            {"name": "output", "datatype": "FP32", "shape": [-1, -1]}
        ]
    with (
        pytest.raises(PeerLostError, match="is the server running"),
        Client("http://127.0.0.1:1") as nobody,
    ):
        nobody.models()
    with pytest.raises(ArgumentError, match="is not the address of a server"):
        Client("localhost:8000")
    with pytest.raises(UnsupportedError), Client(url) as client:
        client.infer("chain", {"x": x.to(torch.complex64)})


@pytest.mark.filterwarnings("ignore")
def test_a_public_client(url: str) -> None:
    triton = pytest.importorskip("tritonclient.http")
    from tritonclient.utils import InferenceServerException

    client = triton.InferenceServerClient(
        url.removeprefix("http://"), network_timeout=100, connection_timeout=100
    )
    try:
        assert (
            client.is_server_live() and client.is_server_ready() and client.is_model_ready("chain")
        )
        assert client.get_server_metadata()["name"] == "torchrelay"
        assert client.get_model_metadata("chain")["inputs"] == [
            {"name": "x", "datatype": "FP32", "shape": [-1, 64]}
        ]
        x = torch.randn(2, 64)
        with torch.inference_mode():
            expected = chain()(x)
        for binary in (True, False):
            given = triton.InferInput("x", [2, 64], "FP32")
            given.set_data_from_numpy(x.numpy(), binary_data=binary)
            for outputs in (None, [triton.InferRequestedOutput("output", binary_data=binary)]):
                answer = client.infer("chain", [given], outputs=outputs, request_id="7")
                assert torch.allclose(
                    torch.from_numpy(answer.as_numpy("output").copy()), expected, atol=1e-6
                )
                assert answer.get_response()["id"] == "7"
        states = {one["name"]: one["state"] for one in client.get_model_repository_index()}
        assert states["chain"] == "READY"
        client.load_model("faulty")
        assert client.is_model_ready("faulty")
        client.unload_model("faulty")
        with pytest.raises(InferenceServerException, match="no model 'none'"):
            client.infer("none", [given])
    finally:
        client.close()


X = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [1.0] * 64}


@pytest.mark.parametrize(
    ("body", "headers", "code", "message"),
    [
        (b"", {}, 400, "JSON"),
        (b"[]", {}, 400, "not an object"),
        (b"{}", {}, 400, "list of objects"),
        (b"[" * 100_000, {}, 400, "JSON"),
        (b'{"inputs": [{}]}', {}, 400, "no name"),
        (json.dumps({"inputs": [{**X, "shape": [1, -64]}]}).encode(), {}, 400, "shape"),
        (json.dumps({"inputs": [{**X, "shape": [1 << 62, 64]}]}).encode(), {}, 400, "64 values"),
        (json.dumps({"inputs": [{**X, "datatype": "FP31"}]}).encode(), {}, 400, "datatype 'FP31'"),
        (
            json.dumps({"inputs": [{**X, "data": ["a"] * 64}]}).encode(),
            {},
            400,
            "is not torch.float32",
        ),
        (json.dumps({"inputs": [X, X]}).encode(), {}, 400, "twice"),
        (
            json.dumps({"inputs": [X], "outputs": [{"name": "y"}]}).encode(),
            {},
            400,
            "no output 'y'",
        ),
        (
            json.dumps({"inputs": [X], "parameters": {"priority": "high"}}).encode(),
            {},
            400,
            "must be a int",
        ),
        (b"{}", {"Inference-Header-Content-Length": "99"}, 400, "the body has 2 bytes"),
        (b"{}", {"Inference-Header-Content-Length": "-1"}, 400, "the body has 2 bytes"),
        (b"{}", {"Content-Encoding": "gzip"}, 400, "compressed"),
        (b"x" * 3_000_000, {}, 413, "exceeds"),
        (
            json.dumps({"inputs": [{**X, "parameters": {"binary_data_size": 4}}]}).encode(),
            {},
            400,
            "256 bytes; binary_data_size is 4",
        ),
    ],
)
def test_malformed_requests_get_a_sentence(
    url: str, body: bytes, headers: dict[str, str], code: int, message: str
) -> None:
    status, answer = post(url, "/v2/models/chain/infer", body, headers)
    assert status == code and message in answer["error"], answer


def test_json_over_plain_http(url: str) -> None:
    status, answer = post(
        url, "/v2/models/chain/versions/1/infer", json.dumps({"id": "a", "inputs": [X]}).encode()
    )
    assert status == 200 and answer["id"] == "a" and answer["model_version"] == "1"
    (output,) = answer["outputs"]
    with torch.inference_mode():
        expected = chain()(torch.ones(1, 64))
    assert torch.allclose(
        torch.tensor(output["data"]).reshape(output["shape"]), expected, atol=1e-6
    )
    assert set(answer["parameters"]) == {"queue_ms", "switch_ms", "compute_ms", "copied_bytes"}
    assert get(url, "/v2/models/chain/versions/9")[0] == 404
    assert get(url, "/v2/models/none/ready")[0] == 404
    assert json.loads(get(url, "/v2")[1])["extensions"] == [
        "binary_tensor_data",
        "model_repository",
    ]


def test_clients_that_send_half_a_request_or_vanish_harm_nobody(server: Server) -> None:
    url, before = server.url, connections(server)
    host, port = url.removeprefix("http://").split(":")
    for sent in (
        b"",
        b"POST /v2/models/chain/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
        b"\x00\xff" * 1000 + b"\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=100) as raw:
            raw.sendall(sent)
    slow = [socket.create_connection((host, int(port)), timeout=100) for _ in range(20)]
    for raw in slow:
        raw.sendall(b"POST /v2/models/chain/infer HTTP/1.1\r\nContent-Le")
    assert calls(url, 8) == [200] * 8
    for raw in slow:
        raw.close()
    until(lambda: connections(server) <= before)


def test_clients_that_read_nothing_harm_nobody(server: Server) -> None:
    url, before = server.url, connections(server)
    host, port = url.removeprefix("http://").split(":")
    x = {"name": "x", "datatype": "FP32", "shape": [1500, 64], "data": [1.0] * 96_000}
    body = json.dumps({"inputs": [x]}).encode()  # the answer takes about 2 MB
    head = f"POST /v2/models/chain/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    served = value(url, "torchrelay_served_total")
    deaf = []
    for _ in range(6):
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((host, int(port)))
        raw.sendall(head.encode() + body)
        deaf.append(raw)
    until(lambda: value(url, "torchrelay_served_total") >= served + 6)
    assert calls(url, 8) == [200] * 8
    for raw in deaf:
        raw.close()
    until(lambda: connections(server) <= before)


def calls(url: str, count: int) -> list[int]:
    """The status codes of so many requests at once."""
    body = json.dumps({"inputs": [X]}).encode()
    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(post, url, "/v2/models/chain/infer", body) for _ in range(count)]
        return [answer.result()[0] for answer in answers]


def connections(server: Server) -> int:
    """The sockets of the server's process, with those of its workers."""
    found = 0
    for descriptor in Path(f"/proc/{server.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(descriptor).startswith("socket:")
    return found


def value(url: str, name: str) -> float:
    """The sum of the metrics whose names start so."""
    lines = get(url, "/metrics")[1].decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


WAITING_CLIENT = """
import http.client, sys
host, port = sys.argv[1].removeprefix("http://").split(":")
connection = http.client.HTTPConnection(host, port, timeout=600)
connection.request("POST", "/v2/models/slow/infer", sys.argv[2])
connection.getresponse()
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


def running(url: str) -> list[int]:
    """The processes that compute a request."""
    workers = json.loads(get(url, "/status.json")[1])["workers"]
    return [worker["pid"] for worker in workers if worker["state"] == "running"]


@contextlib.contextmanager
def stopped_worker(url: str) -> Iterator[None]:
    """A request that computes until the end of the block: its worker is stopped."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, url, "/v2/models/slow/infer", slow_request(8.0))
        until(lambda: bool(running(url)))
        (pid,) = running(url)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
            assert running(url) == [pid] and not answer.done()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert answer.result()[0] == 200


def slow_request(seconds: float, client: str = "") -> bytes:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8},
        {"name": "seconds", "datatype": "FP32", "shape": [], "data": [seconds]},
    ]
    return json.dumps({"inputs": inputs, "parameters": {"client": client}}).encode()


def test_clients_that_are_killed_while_they_compute_or_wait_free_their_places(url: str) -> None:
    def waiting() -> int:
        return len(json.loads(get(url, "/status.json")[1])["queue"])

    def counts() -> dict[str, int]:
        status = json.loads(get(url, "/status.json")[1])
        return {"deaths": status["worker_deaths"], "served": status["counts"]["served"]}

    # Killed while its request computes: the request ends, its answer goes nowhere.
    before = counts()
    client = subprocess.Popen(
        [sys.executable, "-c", WAITING_CLIENT, url, slow_request(2.0).decode()]
    )
    until(lambda: bool(running(url)))
    client.kill()
    client.wait()
    until(lambda: counts()["served"] > before["served"])
    assert counts()["deaths"] == before["deaths"]

    # Killed while it waits.
    request = slow_request(0.0, "killed")
    with ThreadPoolExecutor(1) as pool, stopped_worker(url):
        command = [sys.executable, "-c", WAITING_CLIENT, url, request.decode()]
        clients = [subprocess.Popen(command) for _ in range(2)]
        until(lambda: waiting() == 2)
        assert post(url, "/v2/models/slow/infer", request)[0] == 429
        for client in clients:
            client.kill()
            client.wait()
        until(lambda: waiting() == 0)
        again = pool.submit(post, url, "/v2/models/slow/infer", request)
        until(lambda: waiting() == 1)
    assert again.result()[0] == 200


def test_bench_prints_a_row_for_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links: list[float] = []

    class Link(HostLink):
        def __init__(self, arena: torch.Tensor, *, gbytes_per_s: float = 0.0) -> None:
            links.append(gbytes_per_s)
            super().__init__(arena, gbytes_per_s=gbytes_per_s)

    monkeypatch.setattr(_switcher, "HostLink", Link)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    shutil.copy(MODELS, tmp_path / "models.py")
    text = FILE.replace("[models.slow]", "[models.slow]\nload = false")
    text = text.replace("arena_bytes = 4_000_000", "arena_bytes = 100_000\nworkers = 1")  # not both
    (tmp_path / "models.toml").write_text(text)
    arguments = ["serve", str(tmp_path / "models.toml"), "--bench", "--rounds", "2"]
    done = CliRunner().invoke(app, [*arguments, "--link-gbps", "0.5"], catch_exceptions=False)
    assert done.exit_code == 0 and links == [0.5]
    rows = [line.split("│")[1:-1] for line in done.output.splitlines() if "│" in line]
    assert [row[0].strip() for row in rows] == ["chain", "mixed"]
    assert all(float(cell) > 0 for row in rows for cell in row[1:5])
    assert list((tmp_path / "cache/torchrelay/switching").glob("*.json")), "profiles are kept"


def test_metrics_count_what_was_served(url: str) -> None:
    before = value(url, "torchrelay_served_total")
    post(url, "/v2/models/chain/infer", json.dumps({"inputs": [X]}).encode())
    assert value(url, "torchrelay_served_total") == before + 1
    assert value(url, "torchrelay_compute_seconds_count") >= 1
    assert value(url, "torchrelay_arena_bytes") >= 3_999_000
    assert value(url, 'torchrelay_model_resident{model="chain"}') == 1.0


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
