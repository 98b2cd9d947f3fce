"""Serves the trained model beside the baseline: switches between them, and the usual restart of a
process.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrelay._helper import code_command
from torchrelay.demo.evaluation import MostFrequent
from torchrelay.demo.model import ComplEx
from torchrelay.demo.triples import Graph
from torchrelay.switching import ModelStore, Switcher

__all__ = ["ServedComplEx", "compare_switches"]

_ROUNDS = 20
_QUESTIONS = 16

# What serving another model takes without a switcher: arguments are the file of torch.save and the
# model's sizes.
_RESTART = """
import sys
import torch
from torchrelay.demo.model import ComplEx
model = ComplEx(*map(int, sys.argv[2:]))
model.load_state_dict(torch.load(sys.argv[1], weights_only=True)["model"])
with torch.inference_mode():
    model.score_all(torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int64))
"""


class ServedComplEx(ComplEx):
    """The trained model for serving: its forward pass scores all entities as answers."""

    def forward(self, subjects: Tensor, relations: Tensor) -> Tensor:  # type: ignore[override]
        """Return float32 scores ``(b, entities)`` for int64 subjects and relations ``(b,)``."""
        return self.score_all(subjects, relations)


def compare_switches(
    graph: Graph, dim: int, checkpoint: str, file: str
) -> tuple[float, float, float, list[dict[str, Any]]]:
    """Serve two models of a checkpoint alternately, and compare with the usual ways. Blocks.

    Args:
        checkpoint: a folder with ``model`` (:class:`ComplEx`) and ``baseline``
            (:class:`MostFrequent`).
        file: the same model, written by ``torch.save``.

    Returns seconds until a request is answered: medians for a model whose other ran before, both
    resident, and for a model alone in this process, which has just run; and once by a new process
    that imports torch, loads the model and answers. Then two switches to the
    trained model, one that copies it and one that does not, as the status of a switcher has them.

    Raises:
        TorchRelayError: the checkpoint does not fit, or a worker process cannot be started.
        AssertionError: an answer is not that of the model in this process.
    """
    sizes = {"entities": len(graph.entities), "relations": len(graph.relations)}
    complex_sizes = {**sizes, "dim": dim}
    question = {"subjects": graph.test[:_QUESTIONS, 0], "relations": graph.test[:_QUESTIONS, 1]}
    ready = ServedComplEx(**complex_sizes)
    ready.load_state_dict(torch.load(file, weights_only=True)["model"])
    with ModelStore() as store:
        inputs = dict.fromkeys(question, (torch.int64, (-1,)))
        add = partial(store.add, weights=checkpoint, inputs=inputs)
        add("trained", ServedComplEx, kwargs=complex_sizes, weights_prefix="model.")
        add("baseline", MostFrequent, kwargs=sizes, weights_prefix="baseline.")
        arena_bytes = sum(store.get(name).size_bytes for name in store.names()) + (1 << 20)
        with Switcher(store, arena_bytes=arena_bytes) as switcher, torch.inference_mode():
            for name, model in (("trained", ready), ("baseline", MostFrequent.of(graph))):
                switcher.load(name)
                answer = switcher.infer(name, question)["output"]
                torch.testing.assert_close(answer, model(**question))
            ready_s = _median(lambda: ready(**question))
            both_s = _median(lambda: [switcher.infer(name, question) for name in store.names()])
            resident = _last(switcher, "trained")
        largest = max(store.get(name).size_bytes for name in store.names())
        with Switcher(store, arena_bytes=largest) as switcher:  # without space for the other
            for name in ("trained", "baseline"):
                switcher.load(name)
                switcher.infer(name, question)
            switcher.infer("trained", question)
            switches = [_last(switcher, "trained"), resident]
    restart = [*code_command(_RESTART), file, *map(str, complex_sizes.values())]
    restarted_s = _seconds(lambda: subprocess.run(restart, check=True))
    return both_s / 2, ready_s, restarted_s, switches


def _last(switcher: Switcher, model: str) -> dict[str, Any]:
    """Return the last switch to a model, as the status has it."""
    switches: list[dict[str, Any]] = switcher.status()["switches"]
    return next(one for one in switches if one["model"] == model)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _median(call: Callable[[], object]) -> float:
    return statistics.median(_seconds(call) for _ in range(_ROUNDS))
