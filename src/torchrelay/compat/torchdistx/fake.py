"""``torchdistx.fake``: tensors without memory.

>>> import torch
>>> from torchrelay.compat.torchdistx import fake
>>>
>>> with fake.fake_mode():
...    a = torch.ones([10])
...    b = torch.ones([20], device="cuda")
...
>>> a
tensor(..., size=(10,), fake=True)
>>> b
tensor(..., size=(20,), device=cuda, fake=True)
"""

from torchrelay.deferred.fake import fake_mode, is_fake, meta_like

__all__ = ["fake_mode", "is_fake", "meta_like"]
