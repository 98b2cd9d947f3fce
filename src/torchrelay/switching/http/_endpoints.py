"""The endpoints: the Open Inference Protocol v2 with Triton's extensions, `/metrics`, and a status
page.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchrelay import __version__
from torchrelay.errors import (
    ArgumentError,
    ModelError,
    NotFoundError,
    TorchRelayError,
    UnsupportedError,
)
from torchrelay.switching._switcher import Switcher
from torchrelay.switching.daemon._queue import Reply
from torchrelay.switching.http._messages import HttpError, Request, Response, json_of
from torchrelay.switching.http._metrics import ServerMetrics
from torchrelay.switching.http._repository import Description, Repository
from torchrelay.switching.http._schema import (
    InferRequest,
    LoadRequest,
    ReadyFilter,
    UnloadRequest,
    asked_of,
    parse,
)
from torchrelay.switching.models._store import naming
from torchrelay.switching.models._tensors import HEADER, datatype_of, decode, encode
from torchrelay.switching.worker._profile import Output

__all__ = ["Endpoints"]

_encode = msgspec.json.Encoder().encode
_PAGE = Path(__file__).with_name("status.html")
_EXTENSIONS = ["binary_tensor_data", "model_repository", "statistics", "model_configuration"]


class Endpoints:
    """One method for each path, which returns the response or raises its error."""

    def __init__(self, switcher: Switcher, repository: Repository, is_controlled: bool) -> None:
        self._switcher = switcher
        self._repository = repository
        self._is_controlled = is_controlled
        self._metrics = ServerMetrics(switcher)
        self._statistics: dict[str, _Statistics] = defaultdict(_Statistics)
        self._page = _PAGE.read_bytes()

    async def page(self, _: Request) -> Response:
        """Return the status page."""
        return Response(self._page, content_type="text/html; charset=utf-8")

    async def status(self, _: Request) -> Response:
        """Return the state of the switcher as JSON."""
        return json_of(self._switcher.status())

    async def metrics(self, _: Request) -> Response:
        """Return the server's numbers in Prometheus' form."""
        body, content_type = self._metrics.render()
        return Response(body, content_type=content_type)

    async def server_metadata(self, _: Request) -> Response:
        """Return the name, the version and the extensions of the server."""
        return json_of({"name": "torchrelay", "version": __version__, "extensions": _EXTENSIONS})

    async def live(self, _: Request) -> Response:
        """Return status 200 if the server works."""
        is_live = self._switcher.failure is None
        return json_of({"live": is_live}, 200 if is_live else 503)

    async def ready(self, request: Request) -> Response:
        """Return status 200 if every loaded model can answer, and the server does not end."""
        names, known = self._switcher.models(), self._repository
        is_used = bool(names) or any(map(known.is_on_request, known.entries))
        ready = (
            is_used and all(map(self._switcher.is_ready, names)) and not request.limits.is_ending
        )
        return json_of({"ready": ready}, 200 if ready else 503)

    async def models(self, _: Request) -> Response:
        """Return the names of all models."""
        return json_of({"models": self._repository.names()})

    async def model_ready(self, request: Request, name: str, version: str) -> Response:
        """Return status 200 if the model can answer."""
        self._repository.describe(name, version)
        ready = self._repository.is_ready(name) and not request.limits.is_ending
        return json_of({"name": name, "ready": ready}, 200 if ready else 503)

    async def metadata(self, _: Request, name: str, version: str) -> Response:
        """Return the model's inputs and outputs."""
        if name == "stats" and not version and name not in self._repository.names():
            return self._all_statistics()  # Triton's path for those of every model
        model = self._repository.describe(name, version)
        inputs, outputs = (
            [{"name": key, "datatype": kind, "shape": shape} for key, kind, shape in one]
            for one in _tensors(model)
        )
        versions = [model.version] if model.version else []
        about = {"name": name, "versions": versions, "platform": "pytorch_torchrelay"}
        return json_of({**about, "inputs": inputs, "outputs": outputs})

    async def config(self, _: Request, name: str, version: str) -> Response:
        """Return the model's configuration in Triton's form."""
        model = self._repository.describe(name, version)
        # With batches, Triton's dims are those of a row.
        first = 1 if model.max_batch_size else 0
        inputs, outputs = (
            [
                {"name": key, "data_type": f"TYPE_{kind}", "dims": shape[first:]}
                for key, kind, shape in one
            ]
            for one in _tensors(model)
        )
        return json_of(
            {
                "name": name,
                "platform": "pytorch_torchrelay",
                "backend": "torchrelay",
                "max_batch_size": model.max_batch_size,
                "input": inputs,
                "output": outputs,
            }
        )

    async def statistics(self, _: Request, name: str, version: str) -> Response:
        """Return how often the model answered, and how long that took."""
        found = self._repository.describe(name, version).version
        return json_of({"model_stats": [self._statistics[name].as_json(name, found)]})

    def _all_statistics(self) -> Response:
        found = [
            self._statistics[name].as_json(name, self._version(name))
            for name in self._repository.names()
        ]
        return json_of({"model_stats": found})

    def _version(self, name: str) -> str:
        try:
            return self._repository.describe(name).version
        except NotFoundError:  # of the file, and not loaded
            return ""

    async def infer(self, request: Request, name: str, version: str) -> Response:
        """Run the model on the body's inputs."""
        # First, so that a body for a model that is not there is not read.
        self._repository.describe(name, version)
        started, statistics = time.monotonic(), self._statistics[name]
        body = await request.body()
        try:
            with self._repository.using(name), _of_model(name):
                asked, raw = parse(InferRequest, body, request.headers.get(HEADER.lower()))
                inputs = decode([one.entry for one in asked.inputs], raw)
                del body, raw  # copied: while the request waits, its inputs are kept once
                given = asked.parameters
                timeout = None if given is None else given.timeout
                deadline_s = timeout * 1e-6 if timeout else None  # 0 is no limit
                await self._repository.prepare(name, deadline_s)
                if deadline_s is not None:
                    deadline_s = max(0.0, deadline_s - (time.monotonic() - started))
                priority = (given and given.priority) or 0
                reply = await self._switcher.submit(
                    name, inputs, copy=False, priority=priority, deadline_s=deadline_s
                )
                response = _reply(asked, reply, version)
        except TorchRelayError:
            statistics.add(fail=time.monotonic() - started)
            raise
        statistics.last_ms = int(time.time() * 1e3)
        statistics.add(
            success=time.monotonic() - started,
            queue=reply.queue_s,
            compute_input=reply.switch_s,
            compute_infer=reply.compute_s,
        )
        return response

    async def index(self, request: Request) -> Response:
        """Return the models and their states."""
        wants_ready = (await asked_of(request, ReadyFilter)).ready
        loaded, repository = self._switcher.models(), self._repository
        models = []
        for name in repository.names():
            is_ready, error = self._switcher.is_ready(name), self._switcher.failure_of(name)
            is_loading = name in loaded and error is None
            state = "READY" if is_ready else "LOADING" if is_loading else "UNAVAILABLE"
            reason = str(error or "")
            if name not in loaded and repository.is_on_request(name):
                reason = "is loaded at its first request"
            if is_ready or not wants_ready:
                entry = {"name": name, "version": self._version(name), "state": state}
                models.append({**entry, "reason": reason})
        return json_of(models)

    async def load(self, request: Request, name: str) -> Response:
        """Load or reload a model of the models file; parameters are refused."""
        self._check_control()
        await asked_of(request, LoadRequest)
        await asyncio.shield(asyncio.wrap_future(self._repository.load(name)))
        return json_of({})

    async def unload(self, request: Request, name: str) -> Response:
        """Unload a model of the models file."""
        self._check_control()
        await asked_of(request, UnloadRequest)
        self._repository.unload(name)
        return json_of({})

    def _check_control(self) -> None:
        if not self._is_controlled:
            raise HttpError(
                403,
                "clients may not load or unload models; start the server with --repository-control",
            )


class _Statistics:
    """What Triton's statistics extension reports of one model, in ns."""

    def __init__(self) -> None:
        self.last_ms = 0
        self.counts: Counter[str] = Counter()
        self.ns: Counter[str] = Counter()

    def add(self, **seconds: float) -> None:
        for part, part_s in seconds.items():
            self.counts[part] += 1
            self.ns[part] += int(part_s * 1e9)

    def as_json(self, name: str, version: str) -> dict[str, Any]:
        kinds = ["success", "fail", "queue", "compute_input", "compute_infer", "compute_output"]
        kinds += ["cache_hit", "cache_miss"]
        count = self.counts["success"]
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_ms,
            "inference_count": count,
            "execution_count": count,
            "inference_stats": {
                kind: {"count": self.counts[kind], "ns": self.ns[kind]} for kind in kinds
            },
            "batch_stats": [],
        }


def _of_model(name: str) -> Any:
    return naming(f"model {name!r}", unless=repr(name))


def _reply(asked: InferRequest, reply: Reply, version: str) -> Response:
    """Return the outputs in JSON, but for those that are to be binary."""
    if version not in ("", str(reply.version)):  # it may have been loaded again
        raise NotFoundError(f"model {reply.model!r} has version {reply.version}, not {version}")
    outputs, binary = _outputs(asked, reply)
    content: dict[str, Any] = {
        "model_name": reply.model,
        "model_version": str(reply.version),
        "parameters": {
            "queue_ms": round(reply.queue_s * 1e3, 3),
            "switch_ms": round(reply.switch_s * 1e3, 3),
            "compute_ms": round(reply.compute_s * 1e3, 3),
            "copied_bytes": reply.copied_bytes,
        },
    }
    if asked.id is not None:
        content["id"] = asked.id
    content["outputs"], raw = encode(outputs, binary)
    text = _encode(content)
    if not binary:
        return Response(text)
    headers = {HEADER: str(len(text))}
    return Response(b"".join([text, *raw]), 200, "application/octet-stream", headers)


def _outputs(asked: InferRequest, reply: Reply) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return the outputs that the request asks for, by default all, and the names of those that
    travel in binary.
    """
    try:
        for tensor in reply.outputs.values():
            datatype_of(tensor.dtype)
    except UnsupportedError as error:
        raise ModelError(f"an output of model {reply.model!r} cannot be sent: {error}") from error
    is_binary = bool(asked.parameters and asked.parameters.binary_data_output)
    if not asked.outputs:
        return reply.outputs, set(reply.outputs) if is_binary else set()
    outputs, binary = {}, set()
    for one in asked.outputs:
        if one.name not in reply.outputs:
            names = ", ".join(reply.outputs)
            raise ArgumentError(f"model {reply.model!r} has no output {one.name!r}; it has {names}")
        outputs[one.name] = reply.outputs[one.name]
        wants = None if one.parameters is None else one.parameters.binary_data
        if is_binary if wants is None else wants:
            binary.add(one.name)
    return outputs, binary


def _tensors(model: Description) -> list[list[tuple[str, str, list[int]]]]:
    """Return the name, the datatype and the shape of the inputs, and of the outputs."""
    return [
        [(one.name, datatype_of(one.dtype), [*one.shape]) for one in model.inputs],
        [(one.name, _datatype(one), [-1] * one.dimensions) for one in model.outputs],
    ]


def _datatype(output: Output) -> str:
    """Return the protocol's name of the output's dtype, or torch's where it has none."""
    try:
        return datatype_of(getattr(torch, output.dtype))
    except UnsupportedError:
        return output.dtype
