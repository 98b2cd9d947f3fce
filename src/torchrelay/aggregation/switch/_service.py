"""Threads that serve requests until they are stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from torchrelay.errors import UnavailableError

__all__ = ["ServiceThread"]

_logger = logging.getLogger("torchrelay.aggregation.switch")


class ServiceThread:
    """A running thread that serves until it is stopped.

    Args:
        name: for errors.
        serve: returns when it has been stopped; it must handle errors of single requests itself.
    """

    def __init__(self, name: str, serve: Callable[[], None]) -> None:
        self._name, self._serve = name, serve
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"torchrelay-{name}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if an error has ended the thread.

        Raises:
            UnavailableError: it no longer serves, and its process should exit.
        """
        if self._error is not None:
            raise UnavailableError(
                f"{self._name}: its thread has failed and no longer serves: {self._error!r}; start "
                "it again"
            )

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._error = error
            _logger.critical("%s: its thread has failed", self._name, exc_info=True)
