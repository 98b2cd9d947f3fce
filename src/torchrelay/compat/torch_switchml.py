"""SwitchML's PyTorch plugin: importing this module registers the backend ``sml``.

::

    import torch_switchml                       # after torchrelay.compat.install("torch_switchml")
    dist.init_process_group(backend="sml", ...)

A ``switchml.cfg`` in the current directory is read as before, but is not needed.
"""

from torchrelay.aggregation import register

__all__: list[str] = []

register()
