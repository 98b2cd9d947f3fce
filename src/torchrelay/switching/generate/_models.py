"""Models that generate: what serves them needs to know beside their weights."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import materialize_module
from torchrelay.errors import ArgumentError, StorageError, UnavailableError, UnsupportedError
from torchrelay.switching.generate._text import Tokenizer
from torchrelay.switching.models._factory import Factory

__all__ = [
    "GenerateOptions",
    "Generating",
    "build",
    "generating",
    "language_model_of",
    "need_transformers",
    "snapshot_config",
]

_MAX_BATCH = 128  # descriptors of their stashes come in one message


@dataclass(frozen=True)
class GenerateOptions:
    """How a model that generates is served.

    Args:
        max_context: the most tokens of a prompt and its continuation; 0: as many as the model has
            positions for.
        max_batch_size: how many sequences go through the model together.
        kv_bytes: the most that the keys and values of these may take; 0: no limit.
        weight: its share of the device's time, relative to other models that are in demand.

    Raises:
        ArgumentError: a value is out of bounds.
    """

    max_context: int = 0
    max_batch_size: int = 8
    kv_bytes: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        counts = self.max_context, self.max_batch_size, self.kv_bytes
        if not all(isinstance(one, int) for one in counts):
            raise ArgumentError(
                f"max_context, max_batch_size and kv_bytes must be integers, not {counts}"
            )
        if not 1 <= self.max_batch_size <= _MAX_BATCH:
            raise ArgumentError(
                f"max_batch_size={self.max_batch_size}: it must be from 1 to {_MAX_BATCH}"
            )
        is_weight = self.weight > 0 and math.isfinite(self.weight)
        if self.max_context < 0 or self.kv_bytes < 0 or not is_weight:
            raise ArgumentError(
                f"max_context={self.max_context}, kv_bytes={self.kv_bytes}, weight={self.weight}: "
                "the first two must be at least 0, the weight more, and finite"
            )


@dataclass(frozen=True)
class Generating:
    """What is known of a model that generates."""

    options: GenerateOptions
    max_context: int
    vocabulary: int
    eos: tuple[int, ...]
    tokenizer: Tokenizer | None = None


def build(config: dict[str, Any]) -> torch.nn.Module:
    """Build a model of transformers from what its `config.json` says."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - an extra

    build_from: Any = AutoModelForCausalLM.from_config
    made: torch.nn.Module = build_from(AutoConfig.for_model(**config))
    return made


def need_transformers(what: str) -> None:
    """Raise :class:`UnavailableError` if the `[generate]` extra is missing."""
    try:
        import transformers  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise UnavailableError(
            f"{what} need the extra [generate]: pip install transformers ({error})"
        ) from error


def snapshot_config(folder: Path) -> dict[str, Any]:
    """Return the `config.json` of a Hugging Face snapshot.

    Raises:
        StorageError: the folder has none that is readable.
        UnsupportedError: its model brings code of its own.
    """
    try:
        text = (folder / "config.json").read_text()
        config: dict[str, Any] = json.loads(text, object_hook=_number)
        if not isinstance(config, dict):
            raise ValueError("its config.json is no JSON object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise StorageError(
            f"{folder} is no snapshot of a model: {error}; name a folder with config.json, the "
            "tokenizer and .safetensors files"
        ) from error
    if "auto_map" in config:
        raise UnsupportedError(
            f"{folder}: the model needs code of its own (auto_map), which is not run; write a "
            "factory that builds it"
        )
    return config


def _number(read: dict[str, Any]) -> Any:
    """Return the number that transformers writes so, as JSON has none."""
    return float(read["__float__"]) if [*read] == ["__float__"] else read


def language_model_of(folder: Path, seed: int) -> tuple[Factory, torch.nn.Module]:
    """Return the factory of the language model in a snapshot, and the model with its weights.

    Raises:
        StorageError, UnsupportedError: as of :func:`snapshot_config`.
    """
    from torchrelay import checkpoint  # noqa: PLC0415 - takes a moment to import

    made = Factory.of(build, {"config": snapshot_config(folder)}, seed)
    module = made.build_skeleton()
    checkpoint.load(module, folder, no_dist=True)
    materialize_module(module)  # what no checkpoint holds
    return made, module


def generating(
    name: str, module: torch.nn.Module, options: GenerateOptions, folder: Path | None
) -> Generating:
    """Return what is known of `module`.

    Raises:
        UnavailableError: the `[generate]` extra is missing.
        UnsupportedError: it is no language model of transformers that can be switched.
    """
    need_transformers("models that generate")
    from transformers import PreTrainedModel  # noqa: PLC0415 - an extra

    from torchrelay.switching.generate._kv import (  # noqa: PLC0415
        arguments_of,
        check_cache,
        is_recurrent,
        new_cache,
    )

    if not isinstance(module, PreTrainedModel) or not module.can_generate():
        raise UnsupportedError(
            f"model {name!r} is a {type(module).__name__}; only causal language models of "
            "transformers generate"
        )
    check_cache(module.config)
    taken = arguments_of(module)
    has_states_elsewhere = module._is_stateful and not is_recurrent(new_cache(module.config))
    if has_states_elsewhere or not {"cache", "past_key_values"} & set(taken):
        raise UnsupportedError(
            f"model {name!r} is a {type(module).__name__}, which keeps what it needs of a sequence "
            "elsewhere than in transformers' cache, so it cannot be switched between tokens; serve "
            "it in a program of its own"
        )
    _check_states(module, taken)
    text = module.config.get_text_config(decoder=True)
    positions = max(0, int(getattr(text, "max_position_embeddings", 0) or 0))
    if positions and "position_ids" not in taken:
        # It counts them itself, those that fill a batch's shorter rows included.
        options = dataclasses.replace(options, max_batch_size=1)
    max_context = options.max_context or positions or 4096
    if positions and max_context > positions:
        raise ArgumentError(
            f"model {name!r} has {positions} positions, fewer than max_context={max_context}"
        )
    tokenizer = Tokenizer.of(folder) if folder is not None else None
    eos = getattr(module.generation_config, "eos_token_id", None)
    if folder is not None:
        eos = _eos_of(folder, eos)
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos
    tokens = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),)
    return Generating(options, max_context, int(text.vocab_size), tokens, tokenizer)


def _check_states(module: Any, taken: Collection[str]) -> None:
    """Raise :class:`UnsupportedError` if a run without values shows that a model with states does
    not leave them in the cache. `taken` are the names of its arguments.
    """
    from torchrelay.switching.generate._kv import given_to, new_cache, shape_of  # noqa: PLC0415

    if not module._is_stateful:
        return
    cache = new_cache(module.config)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=module.device)
    tensors = {id(one): one for one in (*module.parameters(), *module.buffers())}
    try:
        module = copy.deepcopy(module, tensors)  # it may keep what it computes
        with torch.no_grad(), _torch.without_values():
            module(**given_to(taken, ids, cache))
    except Exception:  # it needs values
        return
    shape_of(cache, 1)


def _eos_of(folder: Path, default: Any) -> Any:
    """Return what the snapshot's `generation_config.json` says of the tokens that end a text."""
    file = folder / "generation_config.json"
    try:
        return json.loads(file.read_text()).get("eos_token_id") or default
    except FileNotFoundError:
        return default
    except (OSError, ValueError, AttributeError) as error:
        raise StorageError(f"{file} cannot be read: {error}") from error
