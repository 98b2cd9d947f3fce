"""Serving over HTTP: one ASGI application below uvicorn, the models file, and a client.

`_serve` starts a server from a `_models_file`; `_server` is uvicorn's with a drain, `_protocol` its
connections with the limits that it lacks; `_app` maps paths to `_endpoints`, whose bodies `_schema`
describes, behind the checks of `_guard`; `_repository` loads and unloads models for them.
"""

__all__: list[str] = []
