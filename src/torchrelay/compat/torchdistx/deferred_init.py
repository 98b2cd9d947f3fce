"""``torchdistx.deferred_init``: modules whose tensors get their memory and values later.

>>> import torch
>>> from torchrelay.compat.torchdistx import deferred_init
>>>
>>> m = deferred_init.deferred_init(torch.nn.Linear, 10, 20)
>>> m.weight
Parameter containing:
tensor(..., size=(20, 10), requires_grad=True, fake=True)
>>>
>>> deferred_init.materialize_module(m)
>>> m.weight
Parameter containing:
tensor([[...]], requires_grad=True)
"""

from torchrelay.deferred import deferred_init, is_deferred, materialize_module, materialize_tensor

__all__ = ["deferred_init", "is_deferred", "materialize_module", "materialize_tensor"]
