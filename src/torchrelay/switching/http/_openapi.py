"""The server's paths, and their description as OpenAPI and as a page."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from torchrelay import __version__
from torchrelay.switching.http._messages import Response

__all__ = ["Endpoint", "Route", "document", "page"]

Endpoint = Callable[..., Awaitable[Response]]

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>torchrelay: API</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 1rem; }}
  details {{ border-bottom: 1px solid #8884; padding: .4rem 0; }}
  pre {{ overflow-x: auto; font-size: .85rem; }} code {{ font-weight: 600; }}
</style>
<h1>torchrelay {version}: API</h1>
<p>As OpenAPI: <a href="openapi.json">openapi.json</a>. Its state: <a href=".">status page</a>.</p>
{operations}
<h2>Bodies</h2>
{schemas}
"""


class Route(NamedTuple):
    """A path, and what answers it."""

    path: str  # {name} is one segment; what is in [] may be left out
    endpoints: Mapping[str, Endpoint]  # by method; the first line of each docstring describes it
    body: type[msgspec.Struct] | None = None  # of a POST

    @property
    def pattern(self) -> re.Pattern[str]:
        """What matches the path, with groups of the names."""
        text = re.escape(self.path).replace(r"\[", "(?:").replace(r"\]", ")?")
        return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", text))

    @property
    def paths(self) -> list[str]:
        """The path without and with what may be left out."""
        return sorted({re.sub(r"\[.*\]", "", self.path), re.sub(r"[\[\]]", "", self.path)})


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the description of `routes` in OpenAPI's form; bodies are those of their structs."""
    kinds = {route.body for route in routes if route.body is not None}
    order = sorted(kinds, key=lambda kind: kind.__name__)
    references, schemas = msgspec.json.schema_components(
        order, ref_template="#/components/schemas/{name}"
    )
    known = dict(zip(order, references, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        for path in route.paths:
            for method, endpoint in route.endpoints.items():
                body = known[route.body] if route.body and method == "POST" else None
                paths.setdefault(path, {})[method.lower()] = _operation(path, endpoint, body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "torchrelay", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, endpoint: Endpoint, body: Mapping[str, Any] | None) -> dict[str, Any]:
    text = (endpoint.__doc__ or "").partition("\n")[0]
    described: dict[str, Any] = {
        "summary": text,
        "responses": {"200": {"description": "Done"}, "default": {"description": "An error"}},
    }
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        one = {"in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [{"name": name, **one} for name in names]
    if body is not None:
        described["requestBody"] = {"content": {"application/json": {"schema": body}}}
    return described


def page(described: Mapping[str, Any]) -> bytes:
    """Return what :func:`document` returned as a page."""
    operations = [
        _details(f"{method.upper()} {path}", found["summary"], found)
        for path, methods in described["paths"].items()
        for method, found in methods.items()
    ]
    schemas = [
        _details(name, schema.get("description", ""), schema)
        for name, schema in described["components"]["schemas"].items()
    ]
    made = _PAGE.format(
        version=__version__, operations="\n".join(operations), schemas="\n".join(schemas)
    )
    return made.encode()


def _details(name: str, text: str, content: Any) -> str:
    shown = html.escape(json.dumps(content, indent=2))
    return (
        f"<details><summary><code>{html.escape(name)}</code> {html.escape(text)}</summary>"
        f"<pre>{shown}</pre></details>"
    )
