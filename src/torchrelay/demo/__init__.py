"""The demo application: a knowledge-graph model trained on several processes.

:mod:`~torchrelay.demo.launch` reads and checks the data and starts the processes with torchrun;
each runs :mod:`~torchrelay.demo.worker`. :mod:`~torchrelay.demo.code_graph` and
:mod:`~torchrelay.demo.triples` read a graph, :mod:`~torchrelay.demo.model` scores it,
:mod:`~torchrelay.demo.training` and :mod:`~torchrelay.demo.evaluation` train and evaluate,
:mod:`~torchrelay.demo.serving` serves the result, and :mod:`~torchrelay.demo.report` prints.
"""

__all__: list[str] = []
