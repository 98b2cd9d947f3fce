"""The ``python`` of :mod:`preloaded`: sends its arguments, variables, folder and files to the
server beside it and ends as the script does. It starts quickly, without site-packages.
"""

from __future__ import annotations

import array
import json
import os
import resource
import select
import signal
import socket
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
COMMANDS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "torchrelay": ["-c", "from torchrelay.cli import main; main()"],
}
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGQUIT", "SIGALRM")


def conditions() -> str:
    """Return what a script in another process would find different."""
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid", "user")]
    limits = [resource.getrlimit(name) for name in LIMITS]
    mask = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    interrupt = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return json.dumps([namespaces, limits, os.getresuid(), mask, interrupt])


def open_files(besides: int) -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # the listing's own
        if int(name) != besides:
            found.append(int(name))
    return found


def main() -> None:
    arguments = [*COMMANDS.get(os.path.basename(sys.argv[0]), []), *sys.argv[1:]]
    script = list(arguments)
    while script[:1] == ["-B"]:  # of multiprocessing, where no bytecode is to be written
        del script[0]
    unbuffered = script[:1] == ["-u"]
    script = script[unbuffered:]

    def run_new() -> None:
        with open(f"{FOLDER}/interpreter") as file:
            interpreter = file.read()
        os.execv(interpreter, [interpreter, *arguments])

    if not script or (script[0].startswith("-") and script[0] not in ("-c", "-m")):
        run_new()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    server.connect(f"{FOLDER}/server")
    files = open_files(server.fileno())
    request = {
        "arguments": script,
        "unbuffered": unbuffered,
        "environ": {**os.environ, "PARENT_PID": str(os.getppid())},
        "folder": os.getcwd(),
        "files": files,
        "cores": sorted(os.sched_getaffinity(0)),
        "conditions": conditions(),
    }
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    handled = [getattr(signal, number) for number in FORWARDED]
    descriptors = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
    server.sendmsg([json.dumps(request).encode()], [descriptors])
    started = server.recv(100)
    if started == b"refused":
        run_new()
    pid = int(started)
    signal.set_wakeup_fd(wake)
    for number in handled:
        signal.signal(number, lambda number, frame: None)
    while True:
        ready, _, _ = select.select([server.fileno(), woken], [], [])
        if woken in ready:
            for number in os.read(woken, 100):
                os.kill(pid, number)
        if server.fileno() in ready:
            status = int(server.recv(100) or b"256")
            break
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
