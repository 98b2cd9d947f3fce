"""The demo application: a knowledge graph learned on several processes.

:mod:`~torchrelay.demo.launch` reads and checks the data, then starts the processes with torchrun; each of them runs
:mod:`~torchrelay.demo.worker`. The stages: :mod:`~torchrelay.demo.code_graph` and :mod:`~torchrelay.demo.triples` read a
graph, :mod:`~torchrelay.demo.model` scores it, :mod:`~torchrelay.demo.training` and :mod:`~torchrelay.demo.evaluation` do
what they say, :mod:`~torchrelay.demo.serving` serves the result, and :mod:`~torchrelay.demo.report` prints.
"""

__all__: list[str] = []
