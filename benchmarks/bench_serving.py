"""Serving by JSON over keep-alive HTTP beside FastAPI with the model in its process, and calls of a
model in process beside a worker over `multiprocessing.Pipe`.

    pip install --target build/fastapi fastapi uvicorn
    python benchmarks/bench_serving.py          # about five minutes; writes results/serving.md
    python benchmarks/bench_serving.py --smoke  # once, without FastAPI; writes nothing

The servers run at the same time and are asked in turns; answers are compared with the model's own
before anything is timed. FastAPI and what it needs are only for this script, in a folder of their
own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from report import free_port, parser_of, percentile, table, write

from torchrelay.switching import ModelStore, Switcher

ROOT = Path(__file__).parents[1]
FASTAPI = ROOT / "build" / "fastapi"
CLIENTS = (1, 8, 64)
TURNS, TURN_S = 3, 1.0
BERT_TURNS, BERT_TURN_S, BERT_CLIENTS, BATCH = 3, 3.0, 8, 8
TOKENS = 16
# FastAPI on h11 and asyncio, and on httptools and uvloop.
STACKS = {"FastAPI": "plain", "FastAPI[standard]": "standard"}

MODELS = '''
"""The models of both servers."""

import torch

def tiny():
    return torch.nn.Linear(64, 8)

class Bert(torch.nn.Module):
    def __init__(self):
        super().__init__()
        from transformers import BertConfig, BertModel
        self.model = BertModel(BertConfig())

    def forward(self, input_ids):
        return self.model(input_ids).pooler_output

def bert():
    return Bert()
'''

# A FastAPI server of the same interface. A model that takes long is a `def`, which FastAPI runs in
# a thread.
RIVAL = """
import sys, torch, uvicorn
sys.path.insert(0, sys.argv[1])
import models
from fastapi import FastAPI
from pydantic import BaseModel

name, threads, port, stack = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
if threads:
    torch.set_num_threads(threads)
torch.manual_seed(0)
model = getattr(models, name)().eval()
app = FastAPI()
dtypes = {"FP32": torch.float32, "INT64": torch.int64}

class Tensor(BaseModel):
    name: str
    datatype: str
    shape: list[int]
    data: list[float | int]

class Request(BaseModel):
    inputs: list[Tensor]

def run(request):
    inputs = {
        one.name: torch.tensor(one.data, dtype=dtypes[one.datatype]).reshape(one.shape)
        for one in request.inputs
    }
    with torch.inference_mode():
        y = model(*inputs.values())
    data = y.flatten().tolist()
    return {
        "outputs": [{"name": "output", "datatype": "FP32", "shape": list(y.shape), "data": data}]
    }

async def infer(request: Request):
    return run(request)

def infer_in_thread(request: Request):
    return run(request)

function = infer if name == "tiny" else infer_in_thread
app.post(f"/v2/models/{name}/infer")(function)
http, loop = ("httptools", "uvloop") if stack == "standard" else ("h11", "asyncio")
uvicorn.run(
    app, host="127.0.0.1", port=port, http=http, loop=loop, log_level="warning", access_log=False
)
"""

FILE = """
[server]
port = {port}
arena_bytes = 500_000_000
request_bytes = 1_000_000
threads = {threads}
queue_limit = 1024
run_timeout_s = 600
start_timeout_s = 600

[models.{name}]
factory = "models.py:{name}"
inputs = [{{ {input} }}]
{more}
"""
INPUTS = {
    "tiny": 'name = "input", datatype = "FP32", shape = [-1, 64]',
    "bert": f'name = "input_ids", datatype = "INT64", shape = [-1, {TOKENS}]',
}


def body(name: str) -> bytes:
    """A request to the model."""
    if name == "tiny":
        entry = {"name": "input", "datatype": "FP32", "shape": [1, 64]}
        data: list[Any] = [round(0.1 * index, 3) for index in range(64)]
    else:
        entry = {"name": "input_ids", "datatype": "INT64", "shape": [1, TOKENS]}
        data = [100 + index for index in range(TOKENS)]
    return json.dumps({"inputs": [{**entry, "data": data}]}).encode()


def processor_s(pid: int) -> float:
    """The processor time that a process and its children have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [Path(one, "children").read_text() for one in Path(f"/proc/{pid}/task").iterdir()]
    own_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own_s + sum(processor_s(int(child)) for child in " ".join(children).split())


class Server:
    """A server process, and what it is asked."""

    def __init__(self, command: list[str], port: int, name: str, environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(command, env={**os.environ, **environ})
        self.port = port
        data = body(name)
        self.request = (
            f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        ).encode() + data

    async def ask(self, seconds: float) -> list[float]:
        """Ask over one connection for so long; return the time of each answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        times, end = [], time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            await self.exchange(reader, writer)
            times.append(time.perf_counter() - start)
        writer.close()
        return times

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(self.request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(f"a server answered {head!r}")
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        return await reader.readexactly(length)

    def rate(self, clients: int, seconds: float) -> tuple[float, list[float], float]:
        """Return answers a second, the times of each, and the processor time that the server and
        its workers took for one.
        """

        async def run() -> list[list[float]]:
            return await asyncio.gather(*(self.ask(seconds) for _ in range(clients)))

        start, used_s = time.perf_counter(), processor_s(self.process.pid)
        times = [one for each in asyncio.run(run()) for one in each]
        rate = len(times) / (time.perf_counter() - start)
        return rate, times, (processor_s(self.process.pid) - used_s) / len(times)

    def answer(self) -> torch.Tensor:
        async def run() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            answer = await self.exchange(reader, writer)
            writer.close()
            return answer

        deadline = time.monotonic() + 600
        while True:
            try:
                output = json.loads(asyncio.run(run()))["outputs"][0]
                return torch.tensor(output["data"]).reshape(output["shape"])
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise
                time.sleep(0.2)


@contextlib.contextmanager
def servers(name: str, threads: int, ways: dict[str, str]) -> Iterator[dict[str, Server]]:
    """Start FastAPI, if it is installed, and a `torchrelay serve` for each of `ways`."""
    with tempfile.TemporaryDirectory() as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        (folder / "models.py").write_text(MODELS)
        found: dict[str, Server] = {}

        def start(way: str, command: list[str], port: int, environ: dict[str, str]) -> None:
            found[way] = Server(command, port, name, environ)
            stack.callback(found[way].process.wait)
            stack.callback(found[way].process.send_signal, signal.SIGTERM)

        stacks = STACKS if name == "tiny" else {"FastAPI": "plain"}
        for way, packages in stacks.items() if FASTAPI.exists() else ():
            port = free_port()
            command = [sys.executable, "-c", RIVAL, text, name, str(threads), str(port), packages]
            path = os.pathsep.join([str(FASTAPI), *sys.path])
            start(way, command, port, {"PYTHONPATH": path})
        for way, more in ways.items():
            port, file = free_port(), folder / f"{len(found)}.toml"
            file.write_text(
                FILE.format(port=port, name=name, input=INPUTS[name], threads=threads, more=more)
            )
            command = [sys.executable, "-c", "from torchrelay.cli import main; main()", "serve"]
            start(way, [*command, str(file)], port, {"XDG_CACHE_HOME": text})
        answers = {way: server.answer() for way, server in found.items()}
        for answer in answers.values():
            torch.testing.assert_close(answer, next(iter(answers.values())), atol=1e-4, rtol=1e-3)
        yield found


def rates(
    name: str, threads: int, ways: dict[str, str], clients: tuple[int, ...], turns: int, s: float
) -> dict[int, dict[str, list[tuple[float, list[float], float]]]]:
    """Ask the servers in turns, so that all see the same machine."""
    with servers(name, threads, ways) as found:
        measured: dict[int, dict[str, list[tuple[float, list[float], float]]]] = {}
        for count in clients:
            for way, server in found.items():
                server.rate(count, s / 2)
                measured.setdefault(count, {})[way] = []
            for _ in range(turns):
                for way, server in found.items():
                    measured[count][way].append(server.rate(count, s))
    return measured


def rate_rows(
    measured: dict[int, dict[str, list[tuple[float, list[float], float]]]],
) -> list[list[str]]:
    rows = []
    for count, by_way in measured.items():
        medians = {
            way: statistics.median(rate for rate, *_ in runs) for way, runs in by_way.items()
        }
        for way, runs in by_way.items():
            times = [1e3 * one for _, each, _ in runs for one in each]
            spread = [rate for rate, *_ in runs]
            used_us = 1e6 * statistics.median(used_s for _, _, used_s in runs)
            rows.append(
                [
                    str(count),
                    way,
                    f"{medians[way]:.0f} ({min(spread):.0f} to {max(spread):.0f})",
                    f"{percentile(times, 50):.2f} / {percentile(times, 99):.2f}",
                    f"{used_us:.0f}",
                    f"{medians[way] / next(iter(medians.values())):.2f}",
                ]
            )
    return rows


# --- in process


def answer_over_pipe(connection: Connection) -> None:
    """Serve the tiny model in a worker, as a small program would."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8).eval()
    with torch.inference_mode():
        while (given := connection.recv()) is not None:
            connection.send(model(torch.from_numpy(given)).numpy())


def calls(repeats: int) -> dict[str, list[float]]:
    """Times of calls of a tiny model in a worker, by pipe and by switcher in turns, in ms."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    worker = multiprocessing.get_context("spawn").Process(
        target=answer_over_pipe, args=(theirs,), daemon=True
    )
    worker.start()
    x = torch.linspace(0, 1, 64).reshape(1, 64)

    def pipe() -> torch.Tensor:
        ours.send(x.numpy())
        return torch.from_numpy(ours.recv())

    with ModelStore() as store:
        kwargs = {"in_features": 64, "out_features": 8}
        store.add("tiny", "torch.nn:Linear", kwargs=kwargs, inputs={"input": x})
        with Switcher(store, arena_bytes=1 << 20, request_bytes=1 << 20, threads=1) as switcher:
            switcher.load("tiny")

            def infer() -> torch.Tensor:
                return switcher.infer("tiny", {"input": x})["output"]

            assert torch.equal(infer(), pipe())
            ways: dict[str, Callable[[], object]] = {"pipe": pipe, "infer": infer}
            times: dict[str, list[float]] = {way: [] for way in ways}
            for repeat in range(-repeats // 4, repeats):
                for way, run in ways.items():
                    start = time.perf_counter()
                    run()
                    if repeat >= 0:
                        times[way].append(1e3 * (time.perf_counter() - start))
    ours.send(None)
    worker.join()
    return times


def call_rows(times: dict[str, list[float]]) -> list[list[str]]:
    base = statistics.median(times["pipe"])
    rows = []
    for way, each in times.items():
        p10, p50, p99 = (percentile(each, percent) for percent in (10, 50, 99))
        ratio = statistics.median(each) / base
        rows.append([way, f"{p10:.3f}", f"{p50:.3f}", f"{p99:.3f}", f"{ratio:.2f}"])
    return rows


PIPE = """## A call in process

A linear layer of 64 by 8 in another process, a row of 64 numbers each way, one thread. *pipe*:
`multiprocessing.Pipe` and numpy arrays, with nothing around it. *infer*: `Switcher.infer`. ms; the
ratio is of medians."""

HTTP = f"""## A tiny model by JSON over HTTP

The same layer, requests of the Open Inference Protocol over keep-alive connections, one thread.
FastAPI has the model in its process: on uvicorn as `pip install fastapi uvicorn` installs it, with
h11 and asyncio, and as `fastapi[standard]` does, with httptools and uvloop. Answers a second, the
median of {TURNS} turns (least to most); times of an answer, p50 / p99, in ms; the processor time of
the server and its workers for an answer, in us. The ratio is of rates, to the first row. *batches*:
`max_batch_size = {CLIENTS[-1]}`."""

BERT = f"""## BERT-base, {TOKENS} tokens, {BERT_CLIENTS} clients

Random weights, torch's default number of threads. *batches*: `max_batch_size = {BATCH}`."""


def main() -> None:
    parser = parser_of(__doc__, "one short turn, nothing written")
    parser.add_argument("--part", choices=["pipe", "http", "bert"], help="print one part only")
    given = parser.parse_args()
    turns, seconds = (1, 0.2) if given.smoke else (TURNS, TURN_S)
    heads = ["clients", "server", "answers a second", "p50 / p99 ms", "us", "ratio"]
    sections = []
    if given.part in (None, "pipe"):
        times = calls(20 if given.smoke else 3000)
        sections += [PIPE, table(["way", "p10", "p50", "p99", "ratio"], call_rows(times))]
    if given.part in (None, "http"):
        ways = {"torchrelay": "", "batches": f"max_batch_size = {CLIENTS[-1]}"}
        measured = rates("tiny", 1, ways, CLIENTS, turns, seconds)
        sections += [HTTP, table(heads, rate_rows(measured))]
    if given.part in (None, "bert") and not given.smoke:
        ways = {"torchrelay": "", "batches": f"max_batch_size = {BATCH}"}
        measured = rates("bert", 0, ways, (BERT_CLIENTS,), BERT_TURNS, BERT_TURN_S)
        sections += [BERT, table(heads, rate_rows(measured))]
    if given.part or given.smoke:
        print("\n\n".join(sections))
    else:
        write("serving", "Serving", *sections)


if __name__ == "__main__":
    main()
