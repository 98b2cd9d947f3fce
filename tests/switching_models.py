"""Small models that cover what a store must keep; workers build them by this file's name."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from torchrelay.errors import PeerLostError


class Mixed(nn.Module):
    """Tied weights, buffers of several dtypes, a non-persistent buffer, a plain tensor, a recurrent
    layer.
    """

    mask: torch.Tensor
    scale: torch.Tensor

    def __init__(self, width: int = 32, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.BatchNorm1d(width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.narrow = nn.Linear(width, width).to(torch.bfloat16)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.rand(width) > 0.5)
        self.register_buffer("scale", torch.rand(width), persistent=False)
        self.shift = torch.rand(width)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x, _ = self.lstm(x)
        x, _ = self.attention(x, x, x, need_weights=False)
        x = self.narrow(x.to(torch.bfloat16)).float() * self.scale + self.shift * self.mask
        return {"logits": self.head(x), "pooled": x.mean(1)}


class Chain(nn.Module):
    """`depth` linear layers, called in an order that is not that of registration."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


class Folded(nn.Module):
    """Takes its input in rows of 8: its size must be a multiple of that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x.reshape(len(x), -1, 8))
        return result


class Slow(nn.Module):
    """Sleeps between its two layers for as many seconds as its input says."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        time.sleep(float(seconds))
        return self.second(x)


class Faulty(nn.Module):
    """Raises, kills its process, writes to its weights, returns too much or no tensor, breaks the
    device, returns what JSON cannot write, or exits, as its input says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, what: torch.Tensor) -> Any:
        choice = int(what)
        y = self.layer(x)
        if choice == 1:
            raise ValueError("asked to fail")
        if choice == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if choice == 3:
            self.layer.weight.data.zero_()
        if choice == 4:
            return torch.zeros(64 << 20)
        if choice == 5:
            return "no tensor"
        if choice == 6:  # as an illegal access does: every later call on the device fails too
            torch.cuda.synchronize = _broken
            _broken()
        if choice == 7:
            return torch.complex(y, y)
        if choice == 8:
            return y / 0
        if choice == 9:
            sys.exit("asked to exit")
        if choice == 10:
            raise KeyboardInterrupt("asked to stop")
        if choice == 11:
            raise UnreadableError
        if choice == 12:
            raise PeerLostError("of the model's own")
        return y


class UnreadableError(Exception):
    """Has no message, no attributes, and none that can be sent."""

    def __str__(self) -> str:
        raise NotImplementedError

    __repr__ = __str__

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __reduce__(self) -> Any:
        raise TypeError


def _broken(device: object = None) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Rows(nn.Module):
    """Scales each row, and says with how many it was called; a row that begins with -1 raises, one
    that begins with -2 kills the process, one that begins with -3 gives a scalar, and one that
    begins with -4 raises after a second.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> Any:
        first = x[:, 0].tolist()
        if -4.0 in first:
            time.sleep(1.0)
        if -1.0 in first or -4.0 in first:
            raise ValueError("asked to fail")
        if -2.0 in first:
            os.kill(os.getpid(), signal.SIGKILL)
        if -3.0 in first:
            return x.sum()
        return {"scaled": x * self.scale, "rows": torch.full((len(x),), len(x))}


class Autocast(nn.Module):
    """Computes in bfloat16 under autocast, whose cache must not outlive a switch."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return x.float()


class Adder(torch.nn.Module):
    """Takes two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() + y


class _Wrapper(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.dropout = torch.nn.Dropout()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.inner(x=x, y=y))


def exported(kind: str) -> Any:
    """An adder by torch.export."""
    x = torch.zeros(1, 8)
    args = {"positions": (x, x), "program": (x, x), "mixed": (x,)}.get(kind, ())
    kwargs = dict.fromkeys(("x", "y")[len(args) :], x)
    program = torch.export.export(Adder(), args, kwargs)
    if kind == "program":
        return program
    return _Wrapper(program.module()) if kind == "part" else program.module()


class Training:
    """A task with dropout, momentum and data drawn from three generators.

    It sleeps `pace_s` after each step, if a file is named only while that exists.
    """

    def __init__(self, pace_s: float = 0.0, while_exists: str = "", keeps: str = "") -> None:
        self.pace_s = pace_s
        self.keeps = keeps
        self.while_exists = while_exists
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.Dropout(0.5),
            torch.nn.BatchNorm1d(16),
            torch.nn.Linear(16, 1),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, index: int) -> None:
        x = torch.randn(4, 8) * random.random() + float(np.random.rand())
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        if not self.while_exists or os.path.exists(self.while_exists):
            time.sleep(self.pace_s)

    def state_dict(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.keeps == "numpy":
            state["best"] = {"loss": np.float64(1), "all": np.arange(3), "text": np.array(["a"])}
        elif self.keeps == "object":
            state["best"] = {"loss": self.model[1]}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class BrokenTraining(Training):
    """Fails at its third step."""

    def step(self, index: int) -> None:
        if index == 2:
            raise ValueError("no more data")


class Watching(Chain):
    """Returns, too, how many dispatch modes were active, of at most so many that it bears."""

    def __init__(self, bears: int = 1) -> None:
        super().__init__()
        self.bears = bears

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        modes = torch._C._len_torch_dispatch_stack()
        if modes > self.bears:
            raise NotImplementedError("an operator that no mode supports")
        return {"output": super().forward(x), "modes": torch.tensor(modes)}


def mixed(**kwargs: Any) -> nn.Module:
    return Mixed(**kwargs)


def chain(**kwargs: Any) -> nn.Module:
    return Chain(**kwargs)


def watching(**kwargs: Any) -> nn.Module:
    return Watching(**kwargs)


def folded() -> nn.Module:
    return Folded()


def slow() -> nn.Module:
    return Slow()


def faulty() -> nn.Module:
    return Faulty()


def rows() -> nn.Module:
    return Rows()


def autocast() -> nn.Module:
    return Autocast()


def compiled() -> nn.Module:
    """A module compiled by Dynamo, without a C++ compiler; what is compiled is twice as large."""

    def doubled(graph: Any, _: Any) -> Any:
        return lambda *args: tuple(2 * value for value in graph.forward(*args))

    module: Any = torch.compile(Chain(depth=2), backend=doubled)
    return module


def lethal(builder: int) -> nn.Module:
    """Kills every process that builds it but `builder`."""
    if os.getpid() != builder:
        os.kill(os.getpid(), signal.SIGKILL)
    return Slow()


def not_a_module() -> int:
    return 3


def fragile(broken: str) -> nn.Module:
    """Cannot be built while the file `broken` exists."""
    if os.path.exists(broken):
        raise ValueError("cannot be built now")
    return Slow()


def brittle(broken: str) -> nn.Module:
    """Kills every process that builds it while the file `broken` exists."""
    if os.path.exists(broken):
        os.kill(os.getpid(), signal.SIGKILL)
    return Slow()


def patient(held: str) -> nn.Module:
    """Does not return while the file `held` exists."""
    while os.path.exists(held):
        time.sleep(0.01)
    return Slow()


def popping(config: dict[str, int]) -> nn.Module:
    """Takes its argument out of a dict."""
    return nn.Linear(config.pop("width"), 8)


def failing() -> nn.Module:
    raise ValueError("cannot be built")


def hanging(builder: int) -> nn.Module:
    """Never returns but in the process `builder`."""
    while os.getpid() != builder:
        time.sleep(1.0)
    return Slow()


class Helped(nn.Module):
    """Keeps tensors in a helper object, a partial function and a list of modules, drawn by numpy
    too; and its weight in what `keeps` names.
    """

    def __init__(self, keeps: str = "nothing") -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.helper = SimpleNamespace(shift=torch.from_numpy(np.random.rand(8)).float())
        self.scaled = functools.partial(torch.mul, torch.rand(8))
        self.parts = [nn.Linear(8, 8)]
        weight = self.layer.weight
        self.kept = {
            "nothing": None,
            "view": (weight.t(),),
            "list": [weight],
            "partial": functools.partial(torch.mul, weight),
            "closure": lambda: weight,
            "default": lambda kept=weight: kept,
            "keyword": lambda *, kept=weight: kept,
        }[keeps]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.parts[0](self.scaled(self.layer(x))) + self.helper.shift
        return result


def helped(**kwargs: Any) -> nn.Module:
    return Helped(**kwargs)


def scripted() -> nn.Module:
    module: Any = nn.Sequential(torch.jit.script(nn.Linear(8, 8)))
    return module


def lazy() -> nn.Module:
    return nn.LazyLinear(8)


def slow_training(**kwargs: Any) -> Training:
    """A task that takes a while to build."""
    time.sleep(0.5)
    return Training(**kwargs)


def terminating() -> Chain:
    """Ends a process as pools end theirs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    child.terminate()
    assert child.wait() == -signal.SIGTERM
    return Chain()


_tables: dict[int, torch.Tensor] = {}


class _Holder:
    __slots__ = ("table",)

    table: torch.Tensor
    shared: torch.Tensor


@functools.lru_cache
def _table(size: int) -> torch.Tensor:
    return torch.sin(torch.arange(float(size)))


def forget_tables() -> None:
    """Empty what models keep outside of themselves."""
    _tables.clear()
    _table.cache_clear()


class _Scaled(nn.Module):
    """A layer, and a table that is no attribute of it."""

    def __init__(self, keep: Callable[[], Callable[[], torch.Tensor]]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = keep()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) * self.table()
        return y


def in_a_global() -> nn.Module:
    def keep() -> Callable[[], torch.Tensor]:
        if 4 not in _tables:
            _tables[4] = torch.cos(torch.arange(4.0))
        return lambda: _tables[4]

    return _Scaled(keep)


def in_a_cache() -> nn.Module:
    def keep() -> Callable[[], torch.Tensor]:
        size = len(_table(4))
        return lambda: _table(size)

    return _Scaled(keep)


def in_a_deque() -> nn.Module:
    def keep() -> Callable[[], torch.Tensor]:
        tables = deque([torch.rand(4)])
        return lambda: tables[0]

    return _Scaled(keep)


class _Shared(nn.Module):
    """A layer whose weight, and a cached table, are attributes and something else's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = _table(4)
        weight = self.layer.weight
        self.kept = (weight.t() * scale for scale in iter(int, 1.0))
        _Holder.shared = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert next(self.kept).sum() == 0
        y: torch.Tensor = x @ _Holder.shared * _table(4) + self.table
        return y


def in_a_class() -> nn.Module:
    return _Shared()


class Named(nn.Linear):
    """Is built by a class method that it has inherited."""

    @classmethod
    def build(cls) -> Named:
        return cls(4, 2)


class NamedOnce(Named):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@functools.wraps(in_a_class)
def alias() -> nn.Module:
    return nn.Linear(4, 2)


def in_slots() -> nn.Module:
    def keep() -> Callable[[], torch.Tensor]:
        holder = _Holder()
        holder.table = torch.rand(4)
        return lambda: holder.table

    return _Scaled(keep)
