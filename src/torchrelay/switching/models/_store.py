"""Models in host memory, by name, ready to be copied into an arena."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from torchrelay import _native
from torchrelay._platform import need_core
from torchrelay._resource import Resource
from torchrelay.buffers import Segment
from torchrelay.errors import (
    ArgumentError,
    NotFoundError,
    TorchRelayError,
    UnsupportedError,
    from_json,
    to_json,
)
from torchrelay.switching.device._contract import align
from torchrelay.switching.generate._models import (
    GenerateOptions,
    Generating,
    generating,
    language_model_of,
)
from torchrelay.switching.generate._text import Tokenizer
from torchrelay.switching.models._code import digest_of
from torchrelay.switching.models._encoders import Encoding, encoder_of, encoding_of
from torchrelay.switching.models._factory import Factory, hidden_tensors
from torchrelay.switching.models._inputs import PROMPT, TEXTS, InputLike, InputSpec, input_spec
from torchrelay.switching.models._layout import ModelLayout, ModelStorage, layout_of

__all__ = ["ModelStore", "StoredModel", "check_name", "naming"]

_log = logging.getLogger("torchrelay.switching")
_CHECKED_BYTES = 1 << 20  # for each checksum of the weights


@dataclass(frozen=True)
class StoredModel:
    """A model in host memory: its bytes, and what another process needs to build its module."""

    name: str
    factory: Factory
    layout: ModelLayout
    offsets: tuple[int, ...]  # bytes from the start of the segment, one for each storage
    segment: Segment
    inputs: tuple[InputSpec, ...]
    max_batch_size: int = 0
    max_delay_us: int = 0
    version: int = 0
    generating: Generating | None = None  # of a model that generates
    encoding: Encoding | None = None  # of an encoder

    @cached_property
    def specs(self) -> dict[str, InputSpec]:
        """The inputs by name."""
        return {spec.name: spec for spec in self.inputs}

    @property
    def size_bytes(self) -> int:
        return self.segment.size_bytes

    @property
    def language(self) -> Generating:
        """What is known of a model that generates.

        Raises:
            ArgumentError: it does not.
        """
        if self.generating is None:
            raise ArgumentError(
                f"model {self.name!r} does not generate; add it with generate=True, or call infer"
            )
        return self.generating

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a model that generates.

        Raises:
            UnsupportedError: it has none.
        """
        if self.language.tokenizer is None:
            raise UnsupportedError(
                f"model {self.name!r} has no tokenizer: pass a list of token ids as the prompt"
            )
        return self.language.tokenizer

    def check_inputs(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Raise :class:`ArgumentError` unless the model takes `inputs`."""
        if inputs.keys() != self.specs.keys():
            raise ArgumentError(
                f"model {self.name!r} takes the inputs {', '.join(sorted(self.specs))}; got "
                f"{', '.join(sorted(inputs)) or 'none'}"
            )
        for name, tensor in inputs.items():
            self.specs[name].check(tensor, self.name)

    def storage(self, index: int) -> torch.Tensor:
        """Return the bytes of one storage as a uint8 tensor, without copying."""
        start = self.offsets[index]
        return self.bytes(start, start + self.layout.storages[index])

    def bytes(self, start: int, end: int) -> torch.Tensor:
        """Return the bytes from `start` up to `end` of the segment as a uint8 tensor, without
        copying.
        """
        return self.segment.tensor((end - start,), torch.uint8, start)

    def fingerprint(self) -> str:
        """Return a digest of everything but the values: equal models have equal profiles."""
        made = self.factory
        what = made.reference, made.kwargs, digest_of(made.code), self.layout, self.inputs
        return hashlib.sha256(repr(what).encode()).hexdigest()[:32]


class ModelStore(Resource):
    """Models by name, each in one sealed, anonymous block of host memory. Thread-safe.

    Parameters, buffers (persistent or not, of any dtype) and plain tensor attributes are kept, each
    storage once, so that tied weights stay tied, at 512-byte boundaries.
    """

    def __init__(self) -> None:
        need_core("torchrelay.switching")
        self._models: dict[str, StoredModel] = {}
        # The last version of each name, and what it was, also once it is removed.
        self._versions: dict[str, tuple[int, tuple[Any, ...]]] = {}
        self._lock = threading.Lock()

    def add(
        self,
        name: str,
        factory: Callable[..., torch.nn.Module] | str | None = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        inputs: Mapping[str, InputLike] | None = None,
        weights: str | Path | None = None,
        weights_prefix: str = "",
        seed: int = 0,
        max_batch_size: int = 0,
        max_delay_us: int = 0,
        generate: bool | GenerateOptions = False,
        embed: bool = False,
        replace: bool = False,
    ) -> StoredModel:
        """Build a model and keep it.

        Args:
            factory: builds the module: a function or class at the top level of a module or file, or
                its name (`package.module:function`, `/path/to/file.py:function`). Workers call it
                too.
            kwargs: its keyword arguments; JSON values.
            inputs: the arguments of the module's `forward` by name: ``(dtype, shape)`` with -1 for
                dimensions of any size, or ``(dtype, shape, example)`` with a shape that the model
                can run with and requests often have; or a tensor, which fixes every size at its
                own, that of the batch included. The model is profiled with zeros of the example's
                shape; by default with 1 for each -1.
            weights: what replaces the values the factory gave: whatever
                :func:`torchrelay.checkpoint.load` reads, such as a `.safetensors` file or a
                checkpoint's folder; None keeps them.
            weights_prefix: what the module's keys begin with there, such as ``"model."``.
            seed: for the factory's random numbers.
            max_batch_size: requests that wait and whose inputs differ in their first dimension only
                run as one, up to this size of that dimension; 0: each runs by itself.
            max_delay_us: how long a request may wait for others to fill its batch.
            generate: whether it is a causal language model of transformers for
                :meth:`Switcher.generate`, and how that is served. Without a factory, `weights` is
                the folder of a Hugging Face snapshot. `inputs` are known.
            embed: whether it is an encoder, which makes one vector of a text. `weights` is the
                folder of a Hugging Face snapshot, of sentence-transformers too; there is no
                factory. Its inputs are `input_ids` and `attention_mask`.
            replace: replace the model of this name, if there is one.

        Raises:
            ArgumentError: an argument is wrong, or there is a model of this name already.
            CorruptionError, MismatchError, StorageError: `weights` are damaged, do not fit the
                module, or are not there.
            ModelError: the factory raised.
            UnsupportedError: the module has tensors that are not plain and dense.
        """
        check_name(name)
        if not replace:
            self._check_new(name)
        if inputs is None and (generate or embed):
            inputs = PROMPT if generate else TEXTS
        if not isinstance(inputs, Mapping) or not inputs:
            raise ArgumentError(
                f"model {name!r} needs its inputs, as a dict: a name and an example for each"
            )
        specs = tuple(input_spec(key, value) for key, value in inputs.items())
        _report_fixed(name, inputs)
        _check_batching(name, specs, max_batch_size, max_delay_us)
        # Not resolved: a link may lack the suffix.
        folder = None if weights is None else Path(weights).expanduser().absolute()
        with naming(f"model {name!r}"):
            made, module = _built(factory, kwargs, folder, seed, bool(generate), embed)
        if factory is not None and folder is not None:
            _load_weights(name, module, folder, weights_prefix)
        with naming(f"model {name!r}"):
            layout, storages = layout_of(module)
            of_text = encoding = None
            if embed and folder is not None:
                encoding = encoding_of(folder, module)
            if generate:
                options = generate if isinstance(generate, GenerateOptions) else GenerateOptions()
                of_text = generating(name, module, options, folder)
        if weights is not None:
            _check_hidden(name, module, storages)
        *offsets, end_bytes = accumulate(map(align, layout.storages), initial=0)
        segment = Segment.create(max(end_bytes, 1), f"torchrelay-model-{name}"[:200])
        batching = max_batch_size, max_delay_us
        model = StoredModel(
            name, made, layout, tuple(offsets), segment, specs, *batching, 0, of_text, encoding
        )
        for index, storage in enumerate(storages):
            model.storage(index).copy_(storage.bytes())
        sums = _native.crc32c_blocks(segment.memory, _CHECKED_BYTES)
        identity = model.fingerprint(), seed, of_text, encoding, sums  # what makes it a version
        with self._lock:
            if not replace and name in self._models:  # since another thread added it
                self._check_new(name)
            version, last = self._versions.get(name, (0, ()))
            if last != identity:
                version += 1
            self._versions[name] = version, identity
            self._models[name] = model = dataclasses.replace(model, version=version)
        return model

    def _check_new(self, name: str) -> None:
        if name in self._models:
            raise ArgumentError(
                f"there is a model {name!r} already; pass replace=True to replace it, or choose "
                "another name"
            )

    def get(self, name: str) -> StoredModel:
        """Return the model.

        Raises:
            NotFoundError: there is no model of that name.
        """
        with self._lock:
            if name not in self._models:
                raise NotFoundError(
                    f"there is no model {name!r}; there are "
                    f"{', '.join(sorted(self._models)) or 'none'}"
                )
            return self._models[name]

    def remove(self, name: str) -> None:
        """Forget the model; its memory is freed once it is unused.

        Raises:
            NotFoundError: there is no model of that name.
        """
        self.get(name)
        with self._lock:
            self._models.pop(name, None)

    def names(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(self._models))

    def close(self) -> None:
        """Forget all models. Idempotent."""
        with self._lock:
            self._models.clear()


def check_name(name: str) -> None:
    """Raise :class:`ArgumentError` unless `name` may be that of a model, which is part of URLs."""
    if not name.strip(".") or any(not (c.isalnum() or c in "-_.") for c in name):
        raise ArgumentError(
            f"{name!r} is not a valid name of a model: use letters, digits, '-', '_' and '.', and "
            "not only dots"
        )


@contextlib.contextmanager
def naming(what: str, unless: str = "\0") -> Iterator[None]:
    """Let errors of the block begin with `what` they are about, unless they contain `unless`."""
    try:
        yield
    except TorchRelayError as error:
        described = to_json(error)
        if unless in described["message"]:
            raise
        described["message"] = f"{what}: {described['message']}"
        raise from_json(described) from error


def _built(
    factory: Callable[..., torch.nn.Module] | str | None,
    kwargs: Mapping[str, Any] | None,
    folder: Path | None,
    seed: int,
    generates: bool,
    embeds: bool,
) -> tuple[Factory, torch.nn.Module]:
    """Return the factory of a model, and the module; of a snapshot, with its weights."""
    if generates and embeds:
        raise ArgumentError("generate and embed exclude each other")
    if embeds and (factory is not None or folder is None):
        raise ArgumentError("an encoder needs weights, the folder of a snapshot, and no factory")
    if factory is not None:
        made = Factory.of(factory, kwargs, seed)
        return made, made.build_module()
    if folder is None or not (generates or embeds):
        raise ArgumentError(
            "name a factory; only models that generate, and encoders, can be without, if weights "
            "is the folder of a snapshot"
        )
    return (encoder_of if embeds else language_model_of)(folder, seed)


def _report_fixed(name: str, inputs: Mapping[str, InputLike]) -> None:
    """Log that inputs given as tensors have no size of -1."""
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.dim():
            _log.info(
                "model %r: input %r was given as a tensor, so it always has the shape %s, the "
                "size of the batch included; pass (%s, %s) for batches of any size",
                name,
                key,
                tuple(value.shape),
                value.dtype,
                (-1, *value.shape[1:]),
            )


def _load_weights(name: str, module: torch.nn.Module, path: Path, weights_prefix: str) -> None:
    """Load the file or folder `path` into the model's `module`; errors name both."""
    from torchrelay import checkpoint  # noqa: PLC0415 - takes a moment to import

    with naming(f"model {name!r}, weights {path}"):
        checkpoint.load(module, path, prefix=weights_prefix, no_dist=True)


def _check_batching(
    name: str, specs: tuple[InputSpec, ...], max_batch_size: int, max_delay_us: int
) -> None:
    if max_batch_size < 0 or max_delay_us < 0:
        raise ArgumentError(f"model {name!r}: max_batch_size and max_delay_us must be at least 0")
    if max_batch_size and any(spec.shape[:1] != (-1,) for spec in specs):
        raise ArgumentError(
            f"model {name!r} has max_batch_size = {max_batch_size}: the first size of each of its "
            "inputs must be -1"
        )


def _check_hidden(name: str, module: torch.nn.Module, storages: list[ModelStorage]) -> None:
    """Refuse tensors that would not follow the weights of a file into a worker."""
    loaded = {storage.source.data_ptr() for storage in storages if storage.size_bytes}
    for tensor in hidden_tensors(module):
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in loaded:
            raise UnsupportedError(
                f"model {name!r} keeps a weight or a view of it, of shape {tuple(tensor.shape)}, "
                "in a list, a helper object or a function: workers would not see the values of "
                "`weights` there. Read it in forward, or make it an attribute of a module"
            )
