"""`torchrelay serve` as a stranger uses it: the command, clients, plain HTTP."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

import preloaded
import switching_models as models
from serving import Server, X, get, post, value
from torchrelay.errors import (
    ArgumentError,
    ModelError,
    NotFoundError,
    OperationTimeoutError,
    PeerLostError,
    UnsupportedError,
)
from torchrelay.switching import Client
from waiting import eventually

# The first test of the file starts three processes that import torch: minutes where many others
# run.
pytestmark = pytest.mark.timeout(400)


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
        assert client.models() == {**ready, "faulty": "UNAVAILABLE", "lazy": "UNAVAILABLE"}
        with pytest.raises(NotFoundError, match="no model 'none'"):
            client.infer("none", {"x": x})
        with pytest.raises(ArgumentError, match="takes the inputs x; got y"):
            client.infer("chain", {"y": x})
        with pytest.raises(OperationTimeoutError, match="missed its deadline"):
            client.infer("chain", {"x": x}, deadline_s=0.0)
        assert client.infer("chain", {"x": x}, deadline_s=math.inf)
        for wrong in (math.nan, -1.0):
            with pytest.raises(ArgumentError, match=f"deadline_s={wrong}: it must be"):
                client.infer("chain", {"x": x}, deadline_s=wrong)
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


def test_a_call_after_an_interrupted_one_is_answered(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(connection: HTTPConnection) -> None:
        raise KeyboardInterrupt

    with Client(url, timeout_s=100) as client:
        with monkeypatch.context() as patch:
            patch.setattr(HTTPConnection, "getresponse", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.models()
        assert client.models()["chain"] == "READY"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_connects_anew_though_its_parent_is_in_a_call() -> None:
    asked, answered = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        """Answers with the client's port."""

        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path.endswith("/slow"):
                asked.set()
                answered.wait(100)
            body = json.dumps({"port": self.client_address[1]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    reader, writer = os.pipe()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(2) as pool:
        pool.submit(server.serve_forever)
        try:
            with Client(f"http://127.0.0.1:{server.server_port}", timeout_s=100) as client:
                port = client.status()["port"]
                slow = pool.submit(client.metadata, "slow")
                assert asked.wait(100)
                child = os.fork()
                if not child:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.alarm(60)
                    try:
                        os.write(writer, str(client.status()["port"]).encode())
                        client.close()
                    finally:
                        os._exit(0)
                os.close(writer)
                with os.fdopen(reader, "rb") as pipe:
                    theirs = pipe.read().decode()
                os.waitpid(child, 0)
                answered.set()
                assert slow.result()["port"] == port == client.status()["port"]
                assert theirs not in ("", str(port))
        finally:
            answered.set()
            server.shutdown()


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
        assert client.infer("chain", [given], timeout=0).as_numpy("output") is not None
        statistics = client.get_inference_statistics("chain")["model_stats"][0]
        assert statistics["inference_count"] >= 5
        assert len(client.get_inference_statistics()["model_stats"]) == 5
        assert client.get_model_config("chain")["max_batch_size"] == 0
        states = {one["name"]: one["state"] for one in client.get_model_repository_index()}
        assert states["chain"] == "READY"
        client.load_model("faulty")
        assert client.is_model_ready("faulty")
        client.unload_model("faulty")
        with pytest.raises(InferenceServerException, match="no model 'none'"):
            client.infer("none", [given])
    finally:
        client.close()


def infer(**changed: object) -> bytes:
    return json.dumps({"inputs": [{**X, **changed}]}).encode()


def request(**more: object) -> bytes:
    return json.dumps({"inputs": [X], **more}).encode()


@pytest.mark.parametrize(
    ("body", "headers", "code", "message"),
    [
        (b"", {}, 400, "JSON"),
        (b"[]", {}, 400, "Expected `object`, got `array`"),
        (b"{}", {}, 400, "missing required field `inputs`"),
        (b"[" * 100_000, {}, 400, "JSON"),
        (b'{"inputs": [{}]}', {}, 400, "inputs[0]: Object missing required field `name`"),
        (json.dumps({"inputs": [{**X, "shape": [1, -64]}]}).encode(), {}, 400, "shape"),
        (json.dumps({"inputs": [{**X, "shape": [1 << 40, 64]}]}).encode(), {}, 400, "64 values"),
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
            "parameters.priority: Expected `int | null`, got `str`",
        ),
        (b"{}", {"Inference-Header-Content-Length": "99"}, 400, "the body has 2 bytes"),
        (b"{}", {"Inference-Header-Content-Length": "-1"}, 400, "the body has 2 bytes"),
        (b"{}", {"Content-Encoding": "gzip"}, 415, "compressed"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "must be application/json"),
        (b'{"inputs": NaN}', {}, 400, "JSON cannot be read"),
        (infer(data=[float(10**400 > 0)] * 63 + [10**400]), {}, 400, "is not torch.float32"),
        (infer(data=[1e39] * 64), {}, 400, "is not torch.float32, which holds -3.40282e+38 to 3.4"),
        (infer(datatype="FP64", data=[10**400] * 64), {}, 400, "is not torch.float64, which holds"),
        (infer(datatype="FP16", data=[1e5] * 64), {}, 400, "is not torch.float16, which holds"),
        (infer(data=[[0.5] * 63, 0.5]), {}, 400, "is not torch.float32: it has values of list"),
        (infer(data=[True] * 64), {}, 400, "is not torch.float32: it has values of bool"),
        (infer(datatype="UINT8", data=[-1] * 64), {}, 400, "which holds 0 to 255"),
        (
            infer(datatype="INT64", data=[1.7] * 64),
            {},
            400,
            "is not torch.int64: it has values of float",
        ),
        (infer(datatype="INT64", data=[0, 10**30] * 32), {}, 400, "is not torch.int64"),
        (infer(datatype="BOOL", data=[1] * 64), {}, 400, "is not torch.bool: it has values of int"),
        (
            infer(parameters={"shared_memory_region": "r"}),
            {},
            400,
            "'shared_memory_region' is not supported",
        ),
        (request(parameters={"timeout": 10**400}), {}, 400, "parameters.timeout: "),
        (request(parameters={"sequence_id": 1}), {}, 400, "'sequence_id' is not supported"),
        (request(parameters=[1]), {}, 400, "parameters: Expected `object | null`, got `array`"),
        (
            request(outputs=[{"name": ["output"]}]),
            {},
            400,
            "outputs[0].name: Expected `str`",
        ),
        (
            request(outputs=[{"name": "output", "parameters": {"classification": 3}}]),
            {},
            400,
            "'classification' is not supported",
        ),
        (b"x" * 3_000_000, {}, 413, "exceeds"),
        (
            json.dumps({"inputs": [{**X, "parameters": {"binary_data_size": 4}}]}).encode(),
            {},
            400,
            "has both data and binary_data_size; send one",
        ),
    ],
)
def test_malformed_requests_get_a_sentence(
    url: str, body: bytes, headers: dict[str, str], code: int, message: str
) -> None:
    status, answer = post(url, "/v2/models/chain/infer", body, headers)
    assert status == code and message in answer["error"], answer


def test_outputs_that_json_cannot_write(url: str) -> None:
    def ask(what: int, **parameters: object) -> tuple[int, str]:
        given = [
            {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0] * 4},
            {"name": "what", "datatype": "INT64", "shape": [], "data": [what]},
        ]
        body = json.dumps({"inputs": given, "parameters": parameters}).encode()
        request = urllib.request.Request(
            f"{url}/v2/models/faulty/infer", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=100) as answer:
                return answer.status, "" if parameters else str(json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())["error"]

    assert post(url, "/v2/repository/models/faulty/load", b"")[0] == 200
    assert ask(0)[0] == 200
    status, message = ask(7)
    assert status == 500 and "no datatype for torch.complex64" in message
    status, message = ask(8)
    assert status == 400 and "which JSON cannot represent" in message
    assert ask(8, binary_data_output=True)[0] == 200
    status, message = ask(9)
    assert status == 500 and "asked to exit" in message
    status, message = ask(10)
    assert status == 500 and "KeyboardInterrupt: asked to stop" in message
    assert ask(0)[0] == 200
    assert post(url, "/v2/repository/models/faulty/unload", b"")[0] == 200


@pytest.mark.parametrize("parameters", [{"config": "{}"}, {"file:1/model.py": "eA=="}])
def test_a_load_cannot_bring_a_model(url: str, parameters: dict[str, str]) -> None:
    body = json.dumps({"parameters": parameters}).encode()
    status, answer = post(url, "/v2/repository/models/chain/load", body)
    assert status == 400 and "is not supported: leave it out" in answer["error"]


def test_a_large_json_body_is_as_a_small_one(url: str) -> None:
    x = torch.randn(1000, 64)
    big = json.dumps({"inputs": [{**X, "shape": [1000, 64], "data": x.tolist()}]}).encode()
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(post, url, "/v2/models/chain/infer", big) for _ in range(2)]
        wrong = big.replace(b"FP32", b"FP31")
        status, answer = post(url, "/v2/models/chain/infer", wrong)
        assert status == 400 and "datatype 'FP31'" in answer["error"]
        with torch.inference_mode():
            expected = chain()(x)
        for status, answer in (one.result() for one in answers):
            assert status == 200 and answer["model_name"] == "chain"
            (output,) = answer["outputs"]
            got = torch.tensor(output["data"]).reshape(output["shape"])
            assert torch.allclose(got, expected, atol=1e-6)


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
        "statistics",
        "model_configuration",
    ]


def test_metrics_count_what_was_served(url: str) -> None:
    before = value(url, "torchrelay_served_total")
    post(url, "/v2/models/chain/infer", json.dumps({"inputs": [X]}).encode())
    assert value(url, "torchrelay_served_total") == before + 1
    assert value(url, "torchrelay_compute_seconds_count") >= 1
    assert value(url, "torchrelay_arena_bytes") >= 3_999_000
    assert value(url, 'torchrelay_model_resident{model="chain"}') == 1.0


def test_a_model_is_loaded_at_its_first_request_and_unloaded_when_it_is_idle(
    server: Server,
) -> None:
    url = server.url
    x = {"name": "input", "datatype": "FP32", "shape": [2, 4], "data": [1.0] * 8}
    body = json.dumps({"inputs": [x]}).encode()
    for _ in range(2):
        assert get(url, "/v2/models/lazy/ready")[0] == 200
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(post, url, "/v2/models/lazy/infer", body) for _ in range(3)]
            answers = [one.result() for one in asked]
        assert [status for status, _ in answers] == [200] * 3
        assert len({answer["model_version"] for _, answer in answers}) == 1  # one load

        def is_unloaded() -> bool:
            models = json.loads(get(url, "/status.json")[1])["models"]
            return all(one["name"] != "lazy" for one in models)

        eventually(is_unloaded)
    assert list(server.folder.glob("cache/torchrelay/switching/*.json")), "profiles are kept"


def test_a_model_that_comes_into_the_file_is_served(server: Server) -> None:
    """A request for it finds it, and a load reads its table again; nothing else changes."""
    file, url = server.folder / "models.toml", server.url
    before = file.read_text()
    table = before[before.index("[models.lazy]") : before.index("[models.faulty]")]
    request = json.dumps({"inputs": [{**X, "name": "input", "shape": [1, 4], "data": [1.0] * 4}]})
    try:
        file.write_text(before + table.replace("lazy", "late"))
        eventually(lambda: b'"late"' in get(url, "/v2/models")[1])
        assert post(url, "/v2/models/late/infer", request.encode())[0] == 200
        file.write_text(before + table.replace("lazy", "late").replace("imports:", "nowhere:"))
        status, answer = post(url, "/v2/repository/models/late/load", b"")
        assert status == 400 and "cannot load nowhere:make" in answer["error"]
        file.write_text(before + "[models.late]\nfactory = 1\n")
        status, answer = post(url, "/v2/repository/models/late/load", b"")
        assert status == 400 and "models.late" in answer["error"]
        file.write_text(before + table.replace("lazy", "late"))
        assert post(url, "/v2/repository/models/late/load", b"")[0] == 200
        assert post(url, "/v2/repository/models/late/unload", b"")[0] == 200
    finally:
        file.write_text(before)
    eventually(lambda: b'"late"' not in get(url, "/v2/models")[1])


def test_statistics_and_configurations(url: str) -> None:
    def statistics() -> dict[str, Any]:
        (found,) = json.loads(get(url, "/v2/models/chain/stats")[1])["model_stats"]
        return found["inference_stats"]

    before = statistics()
    assert post(url, "/v2/models/chain/infer", request())[0] == 200
    assert post(url, "/v2/models/chain/infer", infer(datatype="FP31"))[0] == 400
    after = statistics()
    for kind in ("success", "fail", "queue", "compute_infer"):
        assert after[kind]["count"] == before[kind]["count"] + 1, kind
    assert after["success"]["ns"] > after["compute_infer"]["ns"] > 0
    config = json.loads(get(url, "/v2/models/chain/config")[1])
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 64]}]
    assert config["output"] == [{"name": "output", "data_type": "TYPE_FP32", "dims": [-1, -1]}]
    names = json.loads(get(url, "/v2/models")[1])["models"]
    assert names == ["chain", "faulty", "lazy", "mixed", "slow"]


def test_outputs_are_known_before_the_first_request(url: str) -> None:
    """Models are profiled when they are loaded."""
    metadata = json.loads(get(url, "/v2/models/slow")[1])
    assert metadata["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, -1]}]


def test_errors_name_the_model(url: str) -> None:
    for body in (infer(shape=[1, 63], data=[1.0] * 63), infer(datatype="FP31"), b"{}", b"nothing"):
        assert "'chain'" in post(url, "/v2/models/chain/infer", body)[1]["error"]


def test_the_command_is_a_module() -> None:
    command = [preloaded.python(), "-m", "torchrelay", "serve", "--help"]
    assert (
        "models file" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
