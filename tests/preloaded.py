"""A ``python`` for scripts of tests that starts in milliseconds, because it has imported torch.

``environment()`` puts it first on the ``PATH``, with a ``torchrun`` and a ``torchrelay`` that run
in it, and makes it the ``sys.executable`` of scripts. It sends its request to a server, which has
imported what most scripts use and forks a process that runs the script as a new interpreter would.
``python`` itself waits for the script, forwards signals to it and ends as it does; if it is killed,
the server kills the script. What the server cannot reproduce (interpreter options, other namespaces
or limits) runs in a new interpreter.

A script is no child of the process that started it, whose id is in ``PARENT_PID``.

Tests of what happens while a program is imported start ``sys.executable`` instead.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

IMPORTED = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torchrelay.aggregation",
    "torchrelay.checkpoint",
    "torchrelay.deferred",
    "torchrelay.parameters",
    "torchrelay.switching",
    "torchrelay.training",  # not mpi, which asks for its launcher when it is imported
]
MOST_BYTES = 1 << 20  # of a request
MOST_FILES = 250  # the kernel passes 253


def environment(interpreter: str = sys.executable, **environ: str) -> dict[str, str]:
    """Return variables for processes that start ``python`` or ``torchrun`` by name."""
    folder = str(Path(python(interpreter)).parent)
    path = f"{folder}:{Path(interpreter).parent}:{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "PATH": path, "PYTHON_EXEC": f"{folder}/python", **environ}


@functools.cache
def python(interpreter: str = sys.executable) -> str:
    """Return the path of the ``python`` that has imported torch; its server starts at first use."""
    folder = Path(tempfile.mkdtemp(prefix="python", dir="/tmp"))
    client = folder / "python"
    source = Path(__file__).with_name("preloaded_client.py").read_text()
    client.write_text(f"#!{interpreter} -IS\n{source}")
    client.chmod(0o755)
    for name in ("torchrun", "torchrelay"):
        (folder / name).symlink_to(client)
    (folder / "interpreter").write_text(interpreter)
    server = subprocess.Popen(
        [interpreter, __file__, str(folder / "server")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    def stop() -> None:
        assert server.stdin and server.stdout
        server.stdin.close()  # which ends it
        server.stdout.close()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    assert server.stdout and server.stdout.read(5) == b"ready", "the server of scripts has ended"
    return str(client)


def serve(address: str) -> dict[str, Any]:
    """Serve requests until standard input ends. Returns the request in each forked process."""
    from preloaded_client import conditions

    own = conditions()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(100)
    os.write(1, b"ready")
    scripts: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd == 0:
                for pid, _ in scripts.values():
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            elif key.fileobj is listener:
                client, _ = listener.accept()
                request, files = receive(client)
                if request is None or request["conditions"] != own:
                    answer(client, "refused")
                    client.close()
                elif pid := os.fork():
                    answer(client, pid)
                    process = os.pidfd_open(pid)
                    scripts[process] = pid, client
                    selector.register(process, selectors.EVENT_READ)
                    selector.register(client, selectors.EVENT_READ, process)
                else:
                    close(selector, listener, client, *(one for _, one in scripts.values()))
                    place(files, request["files"])
                    return request
                for file in files:
                    os.close(file)
            elif key.data in scripts and scripts[key.data][1] is key.fileobj:
                # a client sends nothing more: it was killed, and its script has not just ended
                os.kill(scripts[key.data][0], signal.SIGKILL)
                selector.unregister(key.fileobj)
            elif key.data is None and key.fd in scripts:
                pid, client = scripts.pop(key.fd)
                _, status = os.waitpid(pid, 0)
                selector.unregister(key.fd)
                os.close(key.fd)
                if client in selector.get_map():
                    selector.unregister(client)
                answer(client, status)
                client.close()


def answer(client: socket.socket, text: object) -> None:
    """Send an answer to a client, which may have been killed."""
    with contextlib.suppress(OSError):
        client.send(str(text).encode())


def receive(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return a request, and the received copies of its files."""
    files = array.array("i")
    space = socket.CMSG_SPACE(MOST_FILES * files.itemsize)
    try:
        packet, ancillary, _, _ = client.recvmsg(MOST_BYTES, space)
    except OSError:  # it was killed
        return None, []
    for _, _, descriptors in ancillary:
        files.frombytes(descriptors)
    return json.loads(packet) if packet else None, list(files)


def close(*opened: selectors.BaseSelector | socket.socket) -> None:
    """Close what would close another file if it got its number before."""
    for one in opened:
        one.close()


def place(copies: list[int], files: list[int]) -> None:
    """Make ``copies`` the files of this process, under the numbers ``files``, and close others."""
    import fcntl

    above = max(files, default=0) + 1
    held = [fcntl.fcntl(copy, fcntl.F_DUPFD, above) for copy in copies]
    os.closerange(0, above)
    for copy, file in zip(held, files, strict=True):
        os.dup2(copy, file)
    os.closerange(above, max(held, default=above) + 1 + len(held) + 1000)


def run(request: dict[str, Any]) -> None:
    """Run a script as an interpreter would that starts now."""
    import torch

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    tempfile.tempdir = None  # which those variables may name
    sys.executable = request["environ"].get("PYTHON_EXEC", sys.executable)
    os.sched_setaffinity(0, request["cores"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if filters := os.environ.get("PYTHONWARNINGS"):
        sys.warnoptions[:] = filters.split(",")
        warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    if request["unbuffered"]:
        sys.stdout.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    how, *rest = request["arguments"]
    added = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    if how == "-m":
        sys.path[:1] = [os.getcwd(), *added]
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if how == "-c":
        sys.path[:1] = ["", *added]
        sys.argv[:] = ["-c", *rest[1:]]
        program = compile(rest[0], "<string>", "exec")
    else:
        sys.path[:1] = [os.path.dirname(os.path.abspath(how)), *added]
        sys.argv[:] = [how, *rest]
        main.__file__ = how
        program = compile(Path(how).read_bytes(), how, "exec")
    exec(program, main.__dict__)


if __name__ == "__main__":
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    run(serve(sys.argv[1]))
