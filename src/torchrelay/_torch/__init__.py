"""Private and version-bound torch calls, by topic.

``tests/unit/test_torch_shims.py`` checks each of them on every version in
``docs/compatibility.md``. What differs between these versions says so where it is defined.

Tensor subclasses and dispatch modes of ``deferred`` use some private names directly
(``_make_wrapper_subclass``, ``DispatchKey``, ``torch.utils._python_dispatch``, ``_local_tensor``).
"""

from __future__ import annotations

import warnings

import torch

from torchrelay._torch._autograd import *
from torchrelay._torch._callers import *
from torchrelay._torch._compiler import *
from torchrelay._torch._distributed import *
from torchrelay._torch._modes import *
from torchrelay._torch._operators import *
from torchrelay._torch._shards import *
from torchrelay._torch._tensors import *

# The newest minor version that the tests were run on; pyproject.toml excludes newer ones.
TESTED = (2, 15)


def warn_if_untested(version: str) -> None:
    """Warn if ``version`` of torch is newer than what the tests were run on."""
    if tuple(map(int, version.split(".")[:2])) > TESTED:
        newest = ".".join(map(str, TESTED))
        warnings.warn(
            f"torchrelay was tested with torch up to {newest}, and this is torch {version}; if "
            f"something fails, try torch {newest}",
            stacklevel=2,
        )


warn_if_untested(torch.__version__)
