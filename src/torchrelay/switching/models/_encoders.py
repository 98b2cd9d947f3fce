"""Encoders of Hugging Face snapshots: models that make one vector of a text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrelay.deferred import materialize_module
from torchrelay.errors import MismatchError, StorageError, UnsupportedError
from torchrelay.switching.generate._models import need_transformers, snapshot_config
from torchrelay.switching.generate._text import Tokenizer
from torchrelay.switching.models._factory import Factory

__all__ = ["Encoder", "Encoding", "build", "encoder_of", "encoding_of", "is_encoder"]

# Of sentence-transformers.
_POOLINGS = ("cls", "lasttoken", "max", "mean")
_MODULES = ("Transformer", "Pooling", "Normalize")


class Encoder(torch.nn.Module):
    """A model of transformers, of whose last hidden states the vector of a text is made."""

    def __init__(self, model: torch.nn.Module, pooling: str, normalizes: bool) -> None:
        super().__init__()
        self.model = model
        self._pooling = pooling
        self._normalizes = normalizes

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return one vector for each row, of float32. What is masked ends a row."""
        found = self.model(input_ids=input_ids, attention_mask=attention_mask)
        vectors = self._pooled(found.last_hidden_state.float(), attention_mask.bool())
        return torch.nn.functional.normalize(vectors, dim=-1) if self._normalizes else vectors

    def _pooled(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self._pooling == "cls":
            return states[:, 0]
        counts = mask.sum(1, keepdim=True)
        if self._pooling == "lasttoken":
            index = (counts - 1).clamp(min=0)[..., None]
            return states.take_along_dim(index, 1)[:, 0]
        if self._pooling == "max":
            return states.masked_fill(~mask[..., None], -torch.inf).amax(1)
        return (states * mask[..., None]).sum(1) / counts.clamp(min=1)


@dataclass(frozen=True)
class Encoding:
    """What is known of an encoder beside its weights."""

    max_tokens: int
    vocabulary: int
    tokenizer: Tokenizer | None


def is_encoder(folder: Path) -> bool:
    """Return whether the snapshot is one of an encoder, not of a language model that generates.

    Raises:
        StorageError, UnsupportedError: as of :func:`snapshot_config`.
    """
    names = snapshot_config(folder).get("architectures")
    is_plain = any(
        one.endswith(("Model", "ForMaskedLM")) and not one.endswith("LMHeadModel")
        for one in (map(str, names) if isinstance(names, list) else ())
    )
    return is_plain or (folder / "modules.json").exists()


def build(config: dict[str, Any], pooling: str, normalizes: bool) -> torch.nn.Module:
    """Build an encoder from what a `config.json` says."""
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415 - an extra

    build_from: Any = AutoModel.from_config
    model = build_from(AutoConfig.for_model(**config))
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # of a task; many snapshots lack it
    return Encoder(model, pooling, normalizes)


def encoder_of(folder: Path, seed: int) -> tuple[Factory, torch.nn.Module]:
    """Return the factory of the encoder in a snapshot, and the encoder with its weights.

    Raises:
        MismatchError: weights are missing.
        StorageError, UnsupportedError: as of :func:`snapshot_config`; or vectors are made in a way
            that is not known here.
        UnavailableError: the `[generate]` extra is missing.
    """
    from torchrelay import checkpoint  # noqa: PLC0415 - takes a moment to import

    need_transformers("encoders")
    pooling, normalizes = _pooling_of(folder)
    kwargs = {"config": snapshot_config(folder), "pooling": pooling, "normalizes": normalizes}
    made = Factory.of(build, kwargs, seed)
    module: Any = made.build_skeleton()
    # Not strict: it may have the head of a task.
    missing = checkpoint.load(module.model, folder, strict=False, no_dist=True).missing_keys
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise MismatchError(f"{folder} lacks {len(missing)} tensors of the model: {names}")
    materialize_module(module)  # what no checkpoint holds
    return made, module


def encoding_of(folder: Path, module: Any) -> Encoding:
    """Return what is known of `module`, the encoder in `folder`."""
    config, tokenizer = module.model.config.get_text_config(), Tokenizer.of(folder)
    positions = int(getattr(config, "max_position_embeddings", 0) or 0)
    table: Any = getattr(getattr(module.model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    if padding is not None:  # RoBERTa's positions begin after it
        positions -= padding + 1
    limits = [positions, 0 if tokenizer is None else tokenizer.max_tokens]
    limits += [int(_read(folder / "sentence_bert_config.json", {}).get("max_seq_length") or 0)]
    known = min((one for one in limits if one), default=512)
    return Encoding(known, int(config.vocab_size), tokenizer)


def _pooling_of(folder: Path) -> tuple[str, bool]:
    """Return how vectors are made, as sentence-transformers writes it, and whether they are scaled
    to length 1; without it, means are taken.
    """
    pooling, normalizes = "mean", False
    for one in _read(folder / "modules.json", []):
        kind = str(one.get("type", "")).rpartition(".")[2]
        if kind not in _MODULES:
            raise UnsupportedError(f"{folder}: its module {kind!r} is not known: use a factory")
        normalizes |= kind == "Normalize"
        if kind != "Pooling":
            continue
        modes = _modes(_read(folder / one.get("path", "") / "config.json", {}))
        pooling = modes[0] if len(modes) == 1 else ""
        if pooling not in _POOLINGS:
            raise UnsupportedError(
                f"{folder}: vectors are made by the poolings {modes}; only one of "
                f"{', '.join(_POOLINGS)} is known"
            )
    return pooling, normalizes


def _modes(said: dict[str, Any]) -> list[str]:
    """Return the poolings that a configuration names, by a key or by flags."""
    if named := said.get("pooling_mode"):
        return [named] if isinstance(named, str) else list(named)
    flags = [key for key in said if key.startswith("pooling_mode_") and said[key]]
    return [re.sub("pooling_mode_|_tokens?$", "", one) for one in flags]


def _read(file: Path, default: Any) -> Any:
    try:
        return json.loads(file.read_text()) if file.exists() else default
    except (OSError, ValueError) as error:
        raise StorageError(f"{file} cannot be read: {error}") from error
