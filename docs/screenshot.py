"""Remake docs/images/switching-status.png: the status page of a server under load, as headless
Chromium shows it.

    python docs/screenshot.py

The models are small and their weights random; the page's figures are those of this machine at this
moment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from torchrelay.errors import OverloadedError
from torchrelay.switching import Client

IMAGE = Path(__file__).parent / "images" / "switching-status.png"
SIZE = (1000, 1060)
NAMES = ("encoder", "classifier", "decoder")

MODELS = """
import torch


def encoder(layers):
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    stack = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return torch.nn.Sequential(stack)


def mlp(layers):
    return torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(layers)])
"""

# An arena that holds two of the three, so that some switches copy.
FILE = """
[server]
port = 0
arena_bytes = 52_000_000
request_bytes = 1_000_000
threads = 1

[models.encoder]
factory = "models.py:encoder"
kwargs = { layers = 6 }
inputs = [{ name = "input", datatype = "FP32", shape = [-1, -1, 256] }]

[models.classifier]
factory = "models.py:mlp"
kwargs = { layers = 40 }
inputs = [{ name = "input", datatype = "FP32", shape = [-1, -1, 256] }]

[models.decoder]
factory = "models.py:encoder"
kwargs = { layers = 8 }
priority = 1
inputs = [{ name = "input", datatype = "FP32", shape = [-1, -1, 256] }]
"""


def serve(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A server of its own, and its URL."""
    (folder / "models.py").write_text(MODELS)
    (folder / "models.toml").write_text(FILE)
    code = "from torchrelay.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(folder / "models.toml")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("serving on "):
            return server, line.split()[-1]
    raise SystemExit("the server did not start")


def load(url: str, ended: threading.Event) -> None:
    """Ask one model after another until the picture is taken."""
    x = torch.zeros(1, 64, 256)
    with Client(url, timeout_s=60) as connection:
        number = 0
        while not ended.is_set():
            try:
                connection.infer(NAMES[number % len(NAMES)], {"input": x})
            except OverloadedError:
                time.sleep(0.1)
            number += 1


def take(url: str, browser: str, folder: Path) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--user-data-dir={folder / 'profile'}", f"--window-size={SIZE[0]},{SIZE[1]}"]
    command = [browser, *options, "--virtual-time-budget=5000", f"--screenshot={IMAGE}", url]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("needs chromium or google-chrome")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server, url = serve(folder)
        ended = threading.Event()
        clients = [threading.Thread(target=load, args=(url, ended)) for _ in range(5)]
        try:
            for client in clients:
                client.start()
            time.sleep(3)
            take(url, browser, folder)
        finally:
            ended.set()
            for client in clients:
                client.join()
            server.terminate()
            server.communicate()


if __name__ == "__main__":
    main()
