"""A server for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving import Server, preloaded_workers, serve

__all__ = ["preloaded_workers"]  # of every test here


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from serve(tmp_path_factory.mktemp("serve"))


@pytest.fixture
def url(server: Server) -> str:
    return server.url
