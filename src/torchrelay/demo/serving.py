"""Serves the trained model beside the baseline: switches between them, and the usual restart of a
process.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchrelay._python import code_command
from torchrelay.demo.evaluation import count_answers
from torchrelay.demo.model import ComplEx
from torchrelay.demo.triples import Graph
from torchrelay.switching import ModelStore, Switcher

__all__ = ["MostFrequent", "ServedComplEx", "SwitchTimes", "compare_switches"]

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


class MostFrequent(nn.Module):
    """The baseline: answers each question with the objects most frequent with its relation in
    train.
    """

    counts: Tensor

    def __init__(self, entities: int, relations: int) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(2 * relations, entities))

    @classmethod
    def of(cls, graph: Graph) -> MostFrequent:
        made = cls(len(graph.entities), len(graph.relations))
        made.counts.copy_(count_answers(graph))
        return made

    def forward(self, subjects: Tensor, relations: Tensor) -> Tensor:
        """Return float32 scores ``(b, entities)`` for int64 subjects and relations ``(b,)``."""
        return self.counts[relations]


@dataclass(frozen=True)
class SwitchTimes:
    """Median seconds until a request is answered."""

    switched_s: float  # the other model ran before; both are resident
    ready_s: float  # the model is alone in this process, and has just run
    restarted_s: float  # by a new process that imports torch, loads the model and answers


def compare_switches(graph: Graph, dim: int, checkpoint: str, file: str) -> SwitchTimes:
    """Serve two models of a checkpoint alternately, and compare with the usual ways. Blocks.

    Args:
        checkpoint: a folder with ``model`` (:class:`ComplEx`) and ``baseline``
            (:class:`MostFrequent`).
        file: the same model, written by ``torch.save``.

    Raises:
        TorchRelayError: the checkpoint does not fit, or a worker process cannot be started.
        AssertionError: an answer is not that of the model in this process.
    """
    entities, relations = len(graph.entities), len(graph.relations)
    sizes = {"entities": entities, "relations": relations}
    question = {"subjects": graph.test[:_QUESTIONS, 0], "relations": graph.test[:_QUESTIONS, 1]}
    inputs = dict.fromkeys(question, (torch.int64, (-1,)))
    with ModelStore() as store:
        complex_sizes = {**sizes, "dim": dim}
        for name, factory, kwargs, prefix in (
            ("trained", ServedComplEx, complex_sizes, "model."),
            ("baseline", MostFrequent, sizes, "baseline."),
        ):
            store.add(
                name,
                factory,
                kwargs=kwargs,
                weights=checkpoint,
                weights_prefix=prefix,
                inputs=inputs,
            )
        ready = ServedComplEx(**complex_sizes)
        ready.load_state_dict(torch.load(file, weights_only=True)["model"])
        arena_bytes = sum(store.get(name).size_bytes for name in store.names()) + (1 << 20)
        with Switcher(store, arena_bytes=arena_bytes) as switcher:
            for name in store.names():
                switcher.load(name)
            with torch.inference_mode():
                expected = {
                    "trained": ready(**question),
                    "baseline": MostFrequent.of(graph)(**question),
                }
                for name, scores in expected.items():
                    torch.testing.assert_close(switcher.infer(name, question)["output"], scores)
                ready_s = _median(lambda: ready(**question))
            both_s = _median(lambda: [switcher.infer(name, question) for name in store.names()])
    restarted_s = _seconds(
        lambda: subprocess.run(
            [*code_command(_RESTART), file, str(entities), str(relations), str(dim)],
            check=True,
        )
    )
    return SwitchTimes(both_s / 2, ready_s, restarted_s)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _median(call: Callable[[], object]) -> float:
    return statistics.median(_seconds(call) for _ in range(_ROUNDS))
