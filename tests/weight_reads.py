"""Random modules that read their weights in every way, for the switcher's tests and its soak.

A module is drawn from a seed. Its input chooses the program that it runs: the profile, of zeros,
has seen the first one only.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from torchrelay.switching import ModelStore

PROGRAMS = 4
_WIDTH = 48
_STEPS = 6


class Node(nn.Module):
    """A weight, perhaps shared, and children whose weights it may read."""

    weight: nn.Parameter
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_WIDTH, _WIDTH) / _WIDTH)
        self.register_buffer("scale", torch.rand(_WIDTH))
        self.children_of = nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children_of:
            x = x + child(x)
        return torch.tanh(nn.functional.linear(x, self.weight)) * self.scale


def _call(node: Node, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = node(x)
    return result


def _linear(node: Node, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, node.weight)


def _view(node: Node, x: torch.Tensor) -> torch.Tensor:
    return x @ node.weight.t()[:, : _WIDTH // 2].repeat(1, 2)


def _data(node: Node, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, node.weight.data) * node.scale.detach()


def _rows(node: Node, x: torch.Tensor) -> torch.Tensor:
    return x + nn.functional.embedding(torch.arange(x.shape[0]), node.weight)


def _functional(node: Node, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = functional_call(node, {"scale": node.scale * 2}, (x,))
    return result


def _item(node: Node, x: torch.Tensor) -> torch.Tensor:
    return x * float(node.scale[3]) + int(node.scale.argmax())


def _list(node: Node, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x * value for value in node.scale[:2]]).sum(0) + x


def _gradient(node: Node, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        loss = nn.functional.linear(leaf, node.weight).square().mean()
        of_x, of_weight = torch.autograd.grad(loss, [leaf, node.weight])
        return (x - of_x + of_weight.sum(0)).detach()


def _thread(node: Node, x: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: x.detach() @ node.weight.detach()).result()


OPERATORS: list[Callable[[Node, torch.Tensor], torch.Tensor]] = [
    *(_call, _linear, _view, _data, _rows, _functional, _item, _list)
]
# What no operator mode of the calling thread sees, or inference mode forbids.
UNSEEN: list[Callable[[Node, torch.Tensor], torch.Tensor]] = [_gradient, _thread]


class Reader(nn.Module):
    """A tree of nodes, and for each program the nodes that it reads, in which way."""

    def __init__(self, seed: int, unseen: bool = False) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.nodes = nn.ModuleList(Node() for _ in range(8))
        every: list[Any] = list(self.nodes)
        for index in range(1, len(every)):
            if draw.random() < 0.4:
                every[draw.randrange(index)].children_of.append(every[index])
        if draw.random() < 0.5:
            every[-1].weight = every[0].weight
        ways = OPERATORS + (UNSEEN if unseen else [])
        self.programs = [
            [(draw.choice(ways), draw.randrange(len(every))) for _ in range(_STEPS)]
            for _ in range(PROGRAMS)
        ]

    def forward(self, x: torch.Tensor, program: torch.Tensor) -> torch.Tensor:
        for way, index in self.programs[int(program)]:
            x = way(self.nodes[index], x)  # type: ignore[arg-type]
        return x


class Raw(nn.Module):
    """Reads a buffer by its address, on a branch long before the call that its profile has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.register_buffer("table", torch.randn(64))

    def forward(self, x: torch.Tensor, program: torch.Tensor) -> torch.Tensor:
        if int(program):
            address = self.second.get_buffer("table").data_ptr()
            x = x * ctypes.c_float.from_address(address).value
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Keeper(Raw):
    """Keeps a view of a weight for later requests."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, program: torch.Tensor) -> torch.Tensor:
        if not self.kept:
            self.kept.append(self.second.weight.t())
        return self.second(x) @ self.kept[0]  # type: ignore[no-any-return]


class Referrer(Raw):
    """Has a weak reference to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = weakref.ref(self.second.weight)

    def forward(self, x: torch.Tensor, program: torch.Tensor) -> torch.Tensor:
        weight = self.weight()
        assert weight is not None
        return self.first(x) @ weight  # type: ignore[no-any-return]


_prepared: dict[int, torch.Tensor] = {}


class Preparer(Raw):
    """Keeps a form of a weight by its address, with all other modules of its kind, as the callers
    of kernels do.
    """

    def forward(self, x: torch.Tensor, program: torch.Tensor) -> torch.Tensor:
        key = self.second.weight.data_ptr()
        if key not in _prepared:
            _prepared[key] = self.second.weight.t().contiguous()
        return self.first(x) @ _prepared[key]  # type: ignore[no-any-return]


def answer(copy: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what a copy that nobody switches answers. It uses no form that was kept by address:
    the address may have been that of a copy that is gone.
    """
    _prepared.clear()
    with torch.no_grad():
        result: torch.Tensor = copy(**given)
    return result


def referrer() -> nn.Module:
    return Referrer()


def preparer() -> nn.Module:
    return Preparer()


def raw() -> nn.Module:
    return Raw()


def keeper() -> nn.Module:
    return Keeper()


def reader(seed: int, unseen: bool = False) -> nn.Module:
    return Reader(seed, unseen)


def add(store: ModelStore, name: str, seed: int, unseen: bool = False) -> nn.Module:
    """Store the reader of `seed` as `name`, and return a copy that nobody switches."""
    kwargs: dict[str, Any] = {"seed": seed, "unseen": unseen}
    inputs = {"x": (torch.float32, (-1, _WIDTH)), "program": (torch.int64, ())}
    store.add(name, f"{__file__}:reader", kwargs=kwargs, inputs=inputs, seed=seed)
    torch.manual_seed(seed)
    return reader(**kwargs).eval()


def inputs(draw: random.Random) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    x = torch.randn(draw.randint(1, 3), _WIDTH, generator=generator)
    return {"x": x, "program": torch.tensor(draw.randrange(PROGRAMS))}
