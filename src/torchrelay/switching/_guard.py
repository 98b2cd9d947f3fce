"""Who may send requests to the server: checks of host, origin, key and content type."""

from __future__ import annotations

import base64
import functools
import hmac
import ipaddress
import socket
from urllib.parse import urlsplit

from torchrelay.config import Switching
from torchrelay.switching._connections import HttpError, HttpRequest

__all__ = ["Guard"]

_HEADERS = ("host", "origin", "content-type", "authorization")
_BODY_TYPES = ("application/json", "application/octet-stream")


class Guard:
    """Refuses requests of web pages from elsewhere and of clients without the key.

    A page that a user of this machine visits can send requests to the loopback interface too. Its
    browser names the page's own host in ``Origin``, or, where the page's name was made to resolve
    to this machine, in ``Host``.
    """

    def __init__(self, settings: Switching) -> None:
        self._key = settings.api_key
        named = {name.strip().lower() for name in settings.allowed_hosts.split(",")} - {""}
        self._any_host = "*" in named
        own = {"localhost", settings.host.lower(), socket.gethostname().lower()}
        self._hosts = named | own | {socket.getfqdn().lower()}
        self._problem = functools.lru_cache(maxsize=256)(self._checked)

    def check(self, request: HttpRequest) -> None:
        """Raise :class:`HttpError` if the request is refused."""
        is_health = request.path.startswith("/v2/health/")
        problem = self._problem(request.method, is_health, *map(request.headers.get, _HEADERS))
        if problem is not None:
            asks_key = {"WWW-Authenticate": 'Basic realm="torchrelay"'}  # a browser then does
            raise HttpError(*problem, asks_key if problem[0] == 401 else None)

    def _checked(
        self,
        method: str,
        is_health: bool,
        host: str | None,
        origin: str | None,
        kind: str | None,
        authorization: str | None,
    ) -> tuple[int, str] | None:
        """Return the status and the error of a request that is refused."""
        host = host or ""
        if not self._is_ours(host):
            return 421, (
                f"this server is not addressed as {host!r}; name the host in "
                "TORCHRELAY_SWITCHING_ALLOWED_HOSTS or [server] allowed_hosts"
            )
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return 403, f"requests of web pages from {origin} are refused"
        kind = (kind or _BODY_TYPES[0]).partition(";")[0].strip().lower()
        if method == "POST" and kind not in _BODY_TYPES:
            return 415, f"the body's Content-Type is {kind}; it must be {' or '.join(_BODY_TYPES)}"
        if self._key and not is_health and not self._has_key(authorization or ""):
            return 401, "send the server's key as 'Authorization: Bearer KEY'"
        return None

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if not host or self._any_host or name in self._hosts:  # HTTP 1.0 has no Host header
            return True
        try:
            # An address is not a page's name: every client that reaches it may use it.
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _has_key(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "basic":  # a browser's, for the status page: any user, and the key
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except ValueError:  # no base64, or no UTF-8 in it
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given.strip().encode(), self._key.encode())
