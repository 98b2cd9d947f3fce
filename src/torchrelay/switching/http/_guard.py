"""Who may send requests to the server: checks of host, origin, key and content type."""

from __future__ import annotations

import base64
import functools
import hmac
import ipaddress
import socket
from urllib.parse import urlsplit

from torchrelay.config import Switching
from torchrelay.switching.http._messages import HttpError, Request

__all__ = ["Guard"]

_BODY_TYPES = ("application/json", "application/octet-stream")
_PORTS = {"http": 80, "https": 443}
_PREFLIGHT_S = 600
_CHECKED = ("host", "x-forwarded-host", "origin", "content-type", "authorization")


class Guard:
    """Refuses requests of web pages from elsewhere and of clients without the key.

    A page that a user of this machine visits can send requests to the loopback interface too. Its
    browser names the page's own host in ``Origin``, or, where the page's name was made to resolve
    to this machine, in ``Host``.
    """

    def __init__(self, settings: Switching) -> None:
        self._key = settings.api_key
        self._named = _listed(settings.allowed_hosts)
        own = {"localhost", settings.host, socket.gethostname(), socket.getfqdn()}
        self._hosts = self._named | {name.lower() for name in own}
        self._origins = {origin.rstrip("/") for origin in _listed(settings.allowed_origins)}
        self._problem = functools.lru_cache(maxsize=256)(self._checked)

    def check(self, request: Request) -> None:
        """Raise :class:`HttpError` if the request is refused."""
        hosts = request.count(b"host")
        if hosts > 1 or (hosts == 0 and not request.is_old):
            raise HttpError(400, f"the request has {hosts or 'no'} Host headers; send one")
        is_health = request.path.startswith(("/v2/health/", "/health"))
        fields = (request.headers.get(name, "") for name in _CHECKED)
        problem = self._problem(request.method, is_health, *fields)
        if problem is not None:
            asks_key = {"WWW-Authenticate": 'Basic realm="torchrelay"'}  # a browser then does
            raise HttpError(*problem, asks_key if problem[0] == 401 else None)

    def headers(self, request: Request) -> dict[str, str]:
        """Return what lets the pages of an allowed origin read the response."""
        origin = request.headers.get("origin", "")
        if not self._is_allowed(origin):
            return {}
        headers = {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "Inference-Header-Content-Length",
            "Vary": "Origin",
        }
        if request.method == "OPTIONS":
            # Any: OpenAI's client sends a dozen of its own.
            wanted = request.headers.get("access-control-request-headers", "Authorization")
            headers |= {
                "Access-Control-Allow-Methods": "GET, HEAD, POST",
                "Access-Control-Allow-Headers": wanted,
                "Access-Control-Max-Age": str(_PREFLIGHT_S),
            }
        return headers

    def _checked(
        self,
        method: str,
        is_health: bool,
        host: str,
        forwarded_host: str,
        origin: str,
        content_type: str,
        authorization: str,
    ) -> tuple[int, str] | None:
        """Return the status and the error of a request that is refused."""
        if not self._is_ours(host):
            return 421, (
                f"this server is not addressed as {host!r}; name the host in "
                "TORCHRELAY_SWITCHING_ALLOWED_HOSTS or [server] allowed_hosts"
            )
        # A page elsewhere cannot add X-Forwarded-Host without having asked by OPTIONS.
        is_same = any(self._is_at(origin, one) for one in (host, forwarded_host))
        if origin and not is_same and not self._is_allowed(origin):
            return 403, (
                f"requests of web pages from {origin} are refused; name the origin in "
                "TORCHRELAY_SWITCHING_ALLOWED_ORIGINS or [server] allowed_origins"
            )
        kind = (content_type or _BODY_TYPES[0]).partition(";")[0].strip().lower()
        if method == "POST" and kind not in _BODY_TYPES:
            return 415, f"the body's Content-Type is {kind}; it must be {' or '.join(_BODY_TYPES)}"
        # A browser asks by OPTIONS, without the key, whether a page may send the request.
        needs_key = self._key and not is_health and method != "OPTIONS"
        if needs_key and not self._has_key(authorization):
            return 401, "send the server's key as 'Authorization: Bearer KEY'"
        return None

    def _is_ours(self, host: str) -> bool:
        name, _ = _split(host)
        if not host or "*" in self._named or name in self._hosts:  # HTTP 1.0 has no Host header
            return True
        try:
            # An address is not a page's name: every client that reaches it may use it.
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_allowed(self, origin: str) -> bool:
        return bool(origin) and ("*" in self._origins or origin.lower() in self._origins)

    def _is_at(self, origin: str, host: str) -> bool:
        """Return whether the page comes from `host`: this server, or a proxy in front of it."""
        name, port = _split(host)
        try:
            page = urlsplit(origin.lower())
            theirs, its_port = page.hostname or "", page.port or _PORTS.get(page.scheme, 0)
        except ValueError:
            return False
        if not theirs or theirs != name:
            return False
        # A browser leaves out the scheme's own port. A proxy may pass the name alone.
        return port in (None, its_port) or name in self._named

    def _has_key(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "basic":  # a browser's, for the status page: any user, and the key
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except ValueError:  # no base64, or no UTF-8 in it
                return False
        elif scheme.lower() != "bearer":
            return False
        # A header's bytes come as Latin-1, and are UTF-8 if clients send them so.
        known = self._key.encode()
        texts = given.strip().encode(), given.strip().encode("latin-1", "replace")
        return any(hmac.compare_digest(one, known) for one in texts)


def _listed(text: str) -> set[str]:
    return {one.strip().lower() for one in text.split(",")} - {""}


def _split(host: str) -> tuple[str, int | None]:
    """Return the name and the port of a ``Host`` header; "" if it is none."""
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname or "", parts.port
    except ValueError:
        return "", None
