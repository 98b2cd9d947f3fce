"""The HTTP application without a switcher: who may call it, paths, bodies, memory."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import switching_models as models
from torchrelay.config import Switching
from torchrelay.errors import ModelError, NotFoundError
from torchrelay.switching import InputSpec, ModelStore, Reply
from torchrelay.switching.daemon._owner import OwnersFuture
from torchrelay.switching.http import _app, _messages
from torchrelay.switching.http._messages import Response
from torchrelay.switching.http._models_file import ModelEntry
from torchrelay.switching.http._repository import Repository
from unit.switching.http.test_connections import serve

ENTRY = ModelEntry("chain", {})
OWNER: Any = SimpleNamespace(is_own_thread=True)


class Caller:
    """Sends requests to an application whose switcher only has not failed."""

    def __init__(self, store: ModelStore, **settings: Any) -> None:
        self.switcher: Any = SimpleNamespace(
            failure=None,
            stored=lambda name: None,
            outputs=lambda name: (),
            models=lambda: (),
            is_ready=lambda name: False,
            failure_of=lambda name: None,
        )
        fake: Any = self.switcher
        self.app = _app.Application(fake, store, {"chain": ENTRY}, Switching(**settings))

    def call(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        version: str = "1.1",
        more: tuple[tuple[bytes, bytes], ...] = (),
    ) -> Response:
        given = {"host": "localhost:8000"} | (headers or {})
        sent: list[Any] = []
        fields = [
            (name.encode(), value.encode("latin-1")) for name, value in given.items() if value
        ]
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path}
        scope |= {"http_version": version, "headers": [*fields, *more], "raw_path": path.encode()}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        start, content = sent
        got = {name.decode(): value.decode() for name, value in start["headers"]}
        return Response(content["body"], start["status"], headers=got)

    def status(self, method: str, path: str, **headers: str) -> int:
        return self.call(method, path, headers).status

    def error(self, method: str, path: str, **headers: str) -> str:
        body = json.loads(self.call(method, path, headers).body)
        assert isinstance(body["error"], str)
        return body["error"]


@pytest.fixture
def store() -> Any:
    with ModelStore() as store:
        store.add("chain", models.chain, inputs={"x": torch.ones(1, 64)})
        yield store


def test_web_pages_from_elsewhere_are_refused(store: ModelStore) -> None:
    server = Caller(store, allowed_hosts="models.example, m2.example")
    for host in (
        "localhost",
        "127.0.0.1:8000",
        "[::1]:8000",
        socket.gethostname(),
        "M2.example:80",
    ):
        assert server.status("GET", "/v2", host=host) == 200, host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "[", "a b"):
        assert server.status("GET", "/v2", host=host) == 421, host
    assert Caller(store, allowed_hosts="*").status("GET", "/v2", host="evil.example") == 200
    infer = "/v2/models/none/infer"
    assert server.status("POST", infer, origin="http://localhost:8000") == 404
    for origin in ("http://evil.example", "null", "http://localhost:8001", "file://", "http://["):
        assert server.status("POST", infer, origin=origin) == 403, origin
        assert server.status("GET", "/status.json", origin=origin) == 403, origin
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; b=1"):
        assert server.status("POST", infer, **{"content-type": kind}) == 415, kind
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/octet-stream"):
        assert server.status("POST", infer, **{"content-type": kind}) == 404, kind


def test_the_key_is_asked_of_every_request_but_health(store: ModelStore) -> None:
    server = Caller(store, api_key="opens it")
    basic = base64.b64encode(b"anyone:opens it").decode()
    assert server.status("GET", "/v2/health/live") == server.status("GET", "/health") == 200
    for path in ("/", "/v2", "/metrics", "/status.json", "/v2/models/chain", "/nothing"):
        assert server.status("GET", path) == 401, path
    for wrong in ("Bearer opens", "Bearer", "opens it", "Basic !", "Basic é", "Digest opens it"):
        assert server.status("GET", "/v2", authorization=wrong) == 401, wrong
    for right in ("Bearer opens it", "bearer opens it", f"Basic {basic}"):
        assert server.status("GET", "/v2", authorization=right) == 200, right
    response = server.call("GET", "/v2")
    assert "Bearer KEY" in json.loads(response.body)["error"]
    assert response.headers["WWW-Authenticate"].startswith("Basic")  # a browser then asks for it


def test_models_are_not_loaded_or_unloaded_by_clients_unless_allowed(store: ModelStore) -> None:
    for call in ("load", "unload"):
        path = f"/v2/repository/models/chain/{call}"
        assert Caller(store).status("POST", path) == 403
        assert "--repository-control" in Caller(store).error("POST", path)
        other = path.replace("chain", "other")
        assert Caller(store, repository_control=True).status("POST", other) == 404


def test_versions_are_those_that_are_served(store: ModelStore) -> None:
    """Not those of a store that has a newer one, which is not loaded or could not be."""
    caller = Caller(store)
    caller.switcher.stored = {"chain": store.get("chain")}.get
    caller.switcher.is_ready = lambda name: True
    caller.switcher.failure_of = lambda name: None
    caller.switcher.models = lambda: ("chain",)
    store.add("chain", models.chain, inputs={"x": torch.ones(1, 64)}, replace=True)
    path = "/v2/models/chain/versions/"
    for end in ("", "/ready"):
        assert caller.status("GET", path + "1" + end) == 200
        assert caller.error("GET", path + "2" + end) == "model 'chain' has version 1, not 2"
    assert json.loads(caller.call("GET", "/v2/models/chain").body)["versions"] == ["1"]
    assert json.loads(caller.call("POST", "/v2/repository/index").body)[0]["version"] == "1"
    assert caller.status("POST", path + "2/infer") == 404


def test_a_model_that_failed_is_not_loading(store: ModelStore) -> None:
    caller = Caller(store)
    caller.switcher.models = lambda: ("chain",)
    caller.switcher.is_ready = lambda name: False
    for error, state in ((None, "LOADING"), (ModelError("no such layer"), "UNAVAILABLE")):
        caller.switcher.failure_of = {"chain": error}.get
        (entry,) = json.loads(caller.call("POST", "/v2/repository/index").body)
        assert (entry["state"], entry["reason"]) == (state, str(error or ""))


def test_a_reply_of_another_version_is_not_sent(store: ModelStore) -> None:
    """If the model is loaded again between the arrival of a request and its start."""
    caller = Caller(store)
    reply = OwnersFuture[Reply](OWNER)
    reply.set_result(Reply("chain", 2, {"output": torch.ones(1)}, 0.0, 0.0, 0.0, 0))
    caller.switcher.submit = lambda name, inputs, **options: reply

    def ask(version: str) -> Response:
        return caller.call("POST", f"/v2/models/chain{version}/infer", body=b'{"inputs": []}')

    refused = ask("/versions/1")
    assert refused.status == 404
    assert json.loads(refused.body)["error"] == "model 'chain' has version 2, not 1"
    assert json.loads(ask("").body)["model_version"] == "2"


def test_every_error_is_json(store: ModelStore) -> None:
    server = Caller(store)
    assert server.error("GET", "/v3") == "the server has no path /v3"
    assert server.error("DELETE", "/v2") == "/v2 does not accept DELETE"
    assert server.call("DELETE", "/v2").headers["Allow"] == "GET, HEAD, OPTIONS"
    assert "no model 'none'" in server.error("GET", "/v2/models/none")
    assert server.status("HEAD", "/v2") == 200 and server.status("HEAD", "/v2/models/chain") == 200


def test_unfinished_bodies_take_a_bounded_memory(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it large ones are refused at once; it is free again when the others are given up."""
    monkeypatch.setattr(_app, "_HEADER_BYTES", 0)
    monkeypatch.setattr(_messages, "_SMALL_BODY_BYTES", 100)
    app = Caller(store, request_bytes=1000).app
    head = b"POST /v2/models/chain/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"

    async def client(port: int) -> None:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        for _, writer in opened[:8]:
            writer.write(head % 1000 + b"x" * 900)
        await asyncio.sleep(0.2)
        for reader, writer in opened[8:10]:
            writer.write(head % 1000 + b"x" * 900)
            assert b"429 Too Many Requests" in await reader.readuntil(b"\r\n\r\n")
        reader, writer = opened[11]
        writer.write(head % 100 + b"x" * 100)
        assert b"400 Bad Request" in await reader.readuntil(b"\r\n\r\n")  # read, and no JSON
        reader, writer = opened[10]
        writer.write(head % 1001 + b"x" * 1001)  # the eight still take their memory
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b"413" in answer or b"429" in answer
        for _, one in opened:
            one.close()
        await asyncio.sleep(0.2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % 900 + b"x" * 900)
        assert b"400 Bad Request" in await reader.readuntil(b"\r\n\r\n")  # read, and no JSON
        writer.close()

    serve(app, client)


def _pending(replies: list[OwnersFuture[Reply]]) -> OwnersFuture[Reply]:
    replies.append(OwnersFuture(OWNER))
    return replies[-1]


def test_requests_that_are_not_answered_take_a_bounded_memory(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_app, "_HEADER_BYTES", 0)
    monkeypatch.setattr(_messages, "_SMALL_BODY_BYTES", 100)
    caller, replies = Caller(store, request_bytes=1000), list[OwnersFuture[Reply]]()
    caller.switcher.submit = lambda name, inputs, **options: _pending(replies)
    body = b'{"inputs": []}'.ljust(900)
    head = b"POST /v2/models/chain/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n"

    async def client(port: int) -> None:
        writers: list[asyncio.StreamWriter] = []

        async def send(count: int) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(head + body)
            while len(replies) < count:
                await asyncio.sleep(0.01)
            return reader

        answered = [await send(count) for count in range(1, 9)]
        refused = await send(0)
        assert b"429" in await asyncio.wait_for(refused.readuntil(b"\r\n\r\n"), 60)
        replies[0].set_result(Reply("chain", 1, {"output": torch.ones(1)}, 0.0, 0.0, 0.0, 0))
        assert b"200 OK" in await asyncio.wait_for(answered[0].readuntil(b"\r\n\r\n"), 60)
        await asyncio.wait_for(send(9), 60)
        for writer in writers:
            writer.close()

    serve(caller.app, client)


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(store: ModelStore) -> None:
    app = Caller(store, request_bytes=1000).app
    head = b"POST /v2/models/chain/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n"

    async def client(port: int) -> None:
        for more in (b"", b"Expect: 100-continue\r\n", b"Connection: close\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + more + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
            writer.close()

    serve(app, client)


def test_a_server_that_ends_answers_what_runs_and_refuses_the_rest(store: ModelStore) -> None:
    """Meanwhile it still accepts connections, and says that it is not ready."""
    caller, replies = Caller(store), list[OwnersFuture[Reply]]()
    caller.switcher.submit = lambda name, inputs, **options: _pending(replies)
    caller.switcher.models = lambda: ("chain",)
    caller.switcher.is_ready = lambda name: True
    infer = (
        b"POST /v2/models/chain/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n"
        b'{"inputs": []}'
    )

    async def status(port: int, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(request)
            return (await reader.readuntil(b"\r\n\r\n"))[9:12]

    async def client(port: int) -> asyncio.Task[None]:
        running = asyncio.create_task(status(port, infer))
        while not replies:
            await asyncio.sleep(0.01)

        async def end() -> None:
            while not caller.app.limits.is_ending:
                await asyncio.sleep(0.01)
            get = b"GET /v2/%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
            for path, expected in (
                (b"health/ready", b"503"),
                (b"health/live", b"200"),
                (b"models/chain", b"503"),
            ):
                assert await status(port, get % path) == expected, path
            assert await status(port, infer) == b"503"
            reply = Reply("chain", 1, {"output": torch.ones(1)}, 0.0, 0.0, 0.0, 0)
            replies[0].set_result(reply)
            assert await running == b"200"

        return asyncio.create_task(end())

    serve(caller.app, client)


def test_a_proxy_in_front_may_have_another_port(store: ModelStore) -> None:
    server = Caller(store, allowed_hosts="models.example")
    for origin, headers, status in (
        ("https://models.example:8443", {"host": "models.example"}, 200),
        ("https://models.example", {"host": "models.example:443"}, 200),
        ("http://models.example", {"host": "models.example:443"}, 200),  # it is named
        ("https://models.example:8443", {"host": "models.example:8000"}, 200),
        ("https://localhost:8443", {"host": "localhost"}, 200),
        ("https://localhost:8443", {"host": "localhost:8000"}, 403),
        ("http://localhost", {"host": "localhost:80"}, 200),
        ("http://localhost", {"host": "localhost:8000"}, 403),
        (
            "https://other.example",
            {"host": "127.0.0.1:8000", "x-forwarded-host": "other.example"},
            200,
        ),
        ("https://evil.example", {"host": "models.example"}, 403),
        ("https://evil.example", {"host": "localhost", "x-forwarded-host": "models.example"}, 403),
        ("null", {"host": "localhost"}, 403),
        ("https://localhost:x", {"host": "localhost"}, 403),
    ):
        assert server.status("GET", "/v2", origin=origin, **headers) == status, (origin, headers)


def test_allowed_origins_may_use_the_server(store: ModelStore) -> None:
    """A browser asks by OPTIONS first, without the key."""
    server = Caller(store, allowed_origins="https://app.example, http://b:1", api_key="k")
    origin = {"origin": "https://app.example"}
    asked = server.call(
        "OPTIONS", "/v2/models/chain/infer", {**origin, "access-control-request-method": "POST"}
    )
    assert asked.status == 204 and asked.headers["Allow"] == "POST, OPTIONS"
    assert asked.headers["Access-Control-Allow-Origin"] == "https://app.example"
    wanted = {"access-control-request-headers": "authorization, x-stainless-lang"}
    asked = server.call("OPTIONS", "/v1/models", origin | wanted)
    assert asked.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-lang"
    for authorization, status in (("Bearer k", 200), ("", 401)):
        answer = server.call("GET", "/v2", {**origin, "authorization": authorization})
        assert answer.status == status  # the page may read the error, too
        assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert server.status("OPTIONS", "/v2", origin="https://evil.example") == 403
    assert "Access-Control-Allow-Origin" not in server.call("OPTIONS", "/v2").headers
    assert server.status("OPTIONS", "/v3") == 404
    anyone = Caller(store, allowed_origins="*")
    assert anyone.status("GET", "/v2", origin="https://evil.example") == 200


def test_compressed_bodies_are_refused(store: ModelStore) -> None:
    server = Caller(store)
    for path in ("/v1/completions", "/v1/embeddings", "/v2/models/chain/infer"):
        assert server.status("POST", path, **{"content-encoding": "gzip"}) == 415
        assert server.status("POST", path, **{"content-encoding": "Identity"}) == 400


def test_a_load_reads_the_entry_of_its_model_only(store: ModelStore) -> None:
    entries = {name: ModelEntry(name, {}, load=False) for name in ("chain", "other", "gone")}
    found = {name: ModelEntry(name, {}, keep_s=5.0) for name in ("chain", "other")}
    switcher: Any = Caller(store).switcher
    repository = Repository(switcher, store, dict(entries), lambda: found)
    with contextlib.suppress(RuntimeError):  # there is no event loop
        repository.load("chain")
    assert repository.entries == {**entries, "chain": found["chain"]}
    with pytest.raises(NotFoundError, match="no model 'gone'; it has chain, other"):
        repository.load("gone")


def test_a_request_has_one_host(store: ModelStore) -> None:
    server = Caller(store)
    two = ((b"host", b"localhost"),)
    assert server.call("GET", "/v2", more=two).status == 400
    assert server.call("GET", "/v2", {"host": ""}).status == 400
    assert server.call("GET", "/v2", {"host": ""}, version="1.0").status == 200


X = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1.5]}
# Of each optional field: what is as good as leaving it out, what works too, and what is an error.
OPTIONAL: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
    "id": ([None], ["", "a", 7, 0, -1, 1 << 62], [1.5, [], {}, True]),
    "parameters": ([None, {}], [], ["", [], 1, {"unknown": 1}, {"sequence_id": 0}]),
    "parameters.priority": ([None, 0], [5, -5], ["1", 1.5, True, [], {}]),
    "parameters.timeout": ([None, 0], [1, (1 << 63) - 1], ["1", -1, 1.5, True, 1 << 63, 10**400]),
    "parameters.binary_data_output": ([None, False], [True], ["false", 0, 1, [], {}]),
    "outputs": ([None, []], [[{"name": "output"}]], ["", {}, 1, ["output"], [{}], [{"name": 1}]]),
    "outputs.0.parameters": ([None, {}], [], ["", [], 1, {"classification": 3}]),
    "outputs.0.parameters.binary_data": ([None, False], [True], ["false", "true", 0, 1, []]),
    "inputs.0.parameters": ([None, {}], [], ["", [], 1, {"shared_memory_region": "r"}]),
    "inputs.0.parameters.binary_data_size": ([None], [], [0, 4, 8, -8, "8", 8.0, True]),
}


@pytest.mark.parametrize("path", OPTIONAL)
def test_optional_fields_of_a_request(store: ModelStore, path: str) -> None:
    caller, options = Caller(store), list[dict[str, Any]]()
    reply = OwnersFuture[Reply](OWNER)
    outputs = {"output": torch.ones(1, 2), "second": torch.zeros(1)}
    reply.set_result(Reply("chain", 1, outputs, 0.0, 0.0, 0.0, 0))

    def submit(name: str, inputs: Any, **given: Any) -> OwnersFuture[Reply]:
        options.append(given)
        assert torch.equal(inputs["x"], torch.tensor([[0.5, 1.5]]))
        return reply

    caller.switcher.submit = submit
    base: dict[str, Any] = {"inputs": [X]}
    if path.startswith("outputs."):
        base["outputs"] = [{"name": "output"}]

    def ask(*values: Any) -> tuple[int, Any]:
        body = json.loads(json.dumps(base))
        for value in values:  # none: absent
            *within, last = [int(one) if one.isdecimal() else one for one in path.split(".")]
            target = body
            for one in within:
                target = target[one] if isinstance(one, int) else target.setdefault(one, {})
            target[last] = value
        answer = caller.call("POST", "/v2/models/chain/infer", body=json.dumps(body).encode())
        try:
            return answer.status, json.loads(answer.body)
        except ValueError:  # binary data follows the JSON
            return answer.status, answer.headers["Inference-Header-Content-Length"]

    absent, works, wrong = OPTIONAL[path]
    status, plain = ask()
    assert status == 200
    first = dict(options[-1])
    assert first["deadline_s"] is None and first["priority"] == 0
    for value in absent:
        assert ask(value) == (200, plain), value
        assert options[-1] == first
    for value in works:
        status, answer = ask(value)
        assert status == 200 and (answer, options[-1]) != (plain, first), value
        if path == "id":
            assert answer["id"] == value
    for value in wrong:
        status, answer = ask(value)
        last = path.rpartition(".")[2]
        assert status == 400 and "'chain'" in answer["error"], (value, answer)
        assert last in answer["error"] or "name" in answer["error"], (value, answer)


def test_models_are_described_before_they_are_loaded(store: ModelStore) -> None:
    """If the first request loads them."""
    spec = InputSpec("x", torch.float32, (-1, 64))
    arguments = {"inputs": {"x": spec}, "max_batch_size": 4}
    caller = Caller(store)
    caller.app.repository.entries["lazy"] = ModelEntry("lazy", arguments, load="request")
    ask = caller.call
    metadata = json.loads(ask("GET", "/v2/models/lazy").body)
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 64]}]
    assert metadata["versions"] == [] and ask("GET", "/v2/models/lazy/ready").status == 200
    config = json.loads(ask("GET", "/v2/models/lazy/config").body)
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [64]}]
    assert config["max_batch_size"] == 4
    assert json.loads(ask("GET", "/v2/models").body) == {"models": ["chain", "lazy"]}
    for method in ("GET", "POST"):
        index = json.loads(ask(method, "/v2/repository/index").body)
        assert [one["name"] for one in index] == ["chain", "lazy"]
    assert index[1]["state"] == "UNAVAILABLE" and "first request" in index[1]["reason"]
    (stats,) = json.loads(ask("GET", "/v2/models/lazy/stats").body)["model_stats"]
    assert stats["inference_count"] == 0 and stats["inference_stats"]["fail"]["count"] == 0
    assert len(json.loads(ask("GET", "/v2/models/stats").body)["model_stats"]) == 2
    assert ask("GET", "/v2/health/ready").status == 200


def test_the_access_log_has_a_line_for_each_request(
    store: ModelStore, caplog: pytest.LogCaptureFixture
) -> None:
    server = Caller(store, access_log=True)
    with caplog.at_level("INFO", "torchrelay.switching.access"):
        server.status("GET", "/v2")
        server.status("GET", "/v3%0a")
    first, second = caplog.messages
    assert '"GET /v2 HTTP/1.1" 200 ' in first and first.endswith(" ms")
    assert '"GET /v3%0a HTTP/1.1" 404 ' in second


def test_all_paths_and_bodies_are_described(store: ModelStore) -> None:
    server = Caller(store)
    described = json.loads(server.call("GET", "/openapi.json").body)
    paths, schemas = described["paths"], described["components"]["schemas"]
    for path in ("/v1/embeddings", "/v2/models/{name}/infer", "/metrics"):
        assert path in paths
    versioned = "/v2/models/{name}/versions/{version}/infer"
    assert [one["name"] for one in paths[versioned]["post"]["parameters"]] == ["name", "version"]
    for path, methods in paths.items():
        answer = server.call("OPTIONS", path.format(name="chain", version="1"))
        assert answer.status == 204, path  # the server has it
        assert {one.lower() for one in answer.headers["Allow"].split(", ")} >= methods.keys()
        for found in methods.values():
            assert found["summary"].endswith("."), (path, found)
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    assert schemas["ChatRequest"]["required"] == ["model", "messages"]
    for name in re.findall(r"#/components/schemas/(\w+)", json.dumps(described)):
        assert name in schemas
    page = server.call("GET", "/docs").body.decode()
    assert all(f"<code>POST {path}</code>" in page for path in paths if "post" in paths[path])
    assert "://" not in page  # nothing comes from the network
