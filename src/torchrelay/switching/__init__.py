"""Device memory shared by processes, and models switched in milliseconds.

:class:`SharedCache` is one block of CPU or CUDA memory that several processes map.
:class:`ModelStore` keeps models in host memory, :class:`Switcher` serves them from one arena by
warm worker processes, and ``torchrelay serve`` puts a switcher behind HTTP, which :class:`Client`
speaks.
"""

from torchrelay.switching._switcher import Switcher
from torchrelay.switching.daemon._queue import Reply
from torchrelay.switching.daemon._scheduler import TrainingHandle
from torchrelay.switching.device._cache import Region, SharedCache
from torchrelay.switching.generate._models import GenerateOptions
from torchrelay.switching.generate._stream import Token, TokenStream
from torchrelay.switching.http._client import Client
from torchrelay.switching.models._inputs import InputSpec
from torchrelay.switching.models._store import ModelStore, StoredModel
from torchrelay.switching.worker._training import TrainingTask

__all__ = [
    "Client",
    "GenerateOptions",
    "InputSpec",
    "ModelStore",
    "Region",
    "Reply",
    "SharedCache",
    "StoredModel",
    "Switcher",
    "Token",
    "TokenStream",
    "TrainingHandle",
    "TrainingTask",
]


def __dir__() -> list[str]:
    return __all__
