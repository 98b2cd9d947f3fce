"""The HTTP application without a server: bodies that never end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch

import switching_models as models
from torchrelay.switching import ModelStore, _http


def test_a_body_that_does_not_arrive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_http, "_BODY_TIMEOUT_S", 0.1)
    sent: list[dict[str, Any]] = []
    received = [{"type": "http.request", "body": b'{"inputs"', "more_body": True}]

    async def receive() -> dict[str, Any]:
        if not received:
            await asyncio.Event().wait()
        return received.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v2/models/chain/infer",
        "query_string": b"",
        "headers": [],
    }
    no_switcher: Any = None  # a request that is not read whole reaches none
    with ModelStore() as store:
        store.add("chain", models.chain, inputs={"x": torch.ones(1, 64)})
        app = _http.create_app(no_switcher, store, {}, request_bytes=1000)
        asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 504
    assert "the body did not arrive within 0.1 s" in json.loads(sent[1]["body"])["error"]
