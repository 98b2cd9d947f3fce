"""Commands that start helper processes, independent of the current directory.

``python -m`` and ``python -c`` put the current directory before the standard library, so that a
``secrets.py`` in it would be imported instead. ``-P`` prevents that from Python 3.11 on.
"""

from __future__ import annotations

import os
import sys

__all__ = ["code_command", "module_command", "search_path"]

_WITHOUT_CURRENT_DIRECTORY = "import sys; sys.path[:] = filter(None, sys.path)\n"


def code_command(code: str) -> list[str]:
    """Return a command that runs ``code``, as ``python -c`` does; arguments may follow."""
    return [sys.executable, "-c", _WITHOUT_CURRENT_DIRECTORY + code]


def module_command(module: str) -> list[str]:
    """Return a command that runs a module, as ``python -m`` does; arguments may follow."""
    return code_command(
        f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )


def search_path() -> str:
    """Return a ``PYTHONPATH`` with which a process finds the modules that this one finds."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)
