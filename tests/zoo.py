"""Every module constructor of torch's own test database and every transformers configuration,
small.

:func:`torch_cases` and :func:`transformers_cases` list what there is.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Case", "reason", "torch_cases", "transformers_cases", "transformers_types"]

# The first form of a configuration with at most so many elements is taken, else the first that is
# at most huge.
TINY_ELEMENTS, HUGE_ELEMENTS = 20_000_000, 400_000_000

# Parts of names of whole numbers that are numbers of layers, blocks and experts: at most a few of
# each.
_COUNTS = ("layers", "num_blocks", "depths", "n_layer", "expert")
_NOT_COUNTS = ("per_tok", "topk", "top_k", "size", "dim", "rank")
# Numbers of rows of tables: some rows do.
_TABLES = (
    "vocab",
    "max_position_embeddings",
    "n_positions",
    "num_embeddings",
    "max_source_positions",
)
# Widths are all divided by one number, so that their ratios (width to heads, width to groups) stay
# valid.
_WIDTHS = (
    "size",
    "dim",
    "channel",
    "width",
    "features",
    "embd",
    "d_model",
    "ffn",
    "d_ff",
    "d_kv",
    "hidden",
    "rank",
    "d_latents",
    "filters",
    "upsample_groups",
)
_NOT_WIDTHS = (
    "image",
    "patch_size",
    "patch_stride",
    "num_patch",
    "kernel",
    "window",
    "num_channels",
    "in_channels",
    "stride",
    "input_channels",
    "batch",
    "chunk",
    "crop",
    "grid",
    "num_hidden",
    "num_feature",
    "tile",
    "codebook_size",
    "conv_size",
)
_DIVISORS = (16, 8, 4, 2, 1)

# What a configuration's default lacks or needs from a package that is not here.
_RESNET = {"backbone_config": {"model_type": "resnet", "out_features": ["stage4"]}}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 24},
    "informer": {"prediction_length": 24},
    "time_series_transformer": {"prediction_length": 24},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "conditional_detr": _RESNET,
    "dab-detr": _RESNET,
    "deformable_detr": {
        "backbone_config": {"model_type": "resnet", "out_features": ["stage2", "stage3", "stage4"]}
    },
    "detr": _RESNET,
    "table-transformer": _RESNET,
}


@dataclass(frozen=True)
class Case:
    """A module that can be built: ``fresh()()`` makes it, from copies of its arguments made by
    ``fresh()``.

    ``family`` is ``torch`` or ``transformers``.
    """

    family: str
    name: str
    fresh: Callable[[], Callable[[], nn.Module]] = field(compare=False)

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


def torch_cases() -> Iterator[Case]:
    """Each constructor call that torch's own tests make, on CPU in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db

    for info in module_db:
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
        )
        for index, module_input in enumerate(inputs):
            call = module_input.constructor_input
            yield Case(
                "torch",
                f"{info.name}-{index}",
                _constructor(info.module_cls, call.args, call.kwargs),
            )


def _constructor(
    cls: type[nn.Module], args: Any, kwargs: Any
) -> Callable[[], Callable[[], nn.Module]]:
    def fresh() -> Callable[[], nn.Module]:
        return functools.partial(cls, *copy.deepcopy(args), **copy.deepcopy(kwargs))

    return fresh


def transformers_types() -> list[str]:
    """The names of all configurations."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]

    return sorted(CONFIG_MAPPING_NAMES)


def transformers_cases(names: list[str] | None = None) -> Iterator[Case | tuple[str, str]]:
    """For each configuration a :class:`Case`, or (name, reason) if no form of it builds eagerly on
    this machine.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    for name in names or transformers_types():
        try:
            yield _transformers_case(name)
        except Exception as error:
            yield name, reason(error)


def reason(error: Exception) -> str:
    """The error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"/\S*/site-packages/", "", lines[0] if lines else "")
    return f"{type(error).__name__}: {text}"[:200]


def _transformers_case(name: str) -> Case:
    """The smallest form of the configuration that builds; raises what the largest one raised if
    none does.
    """
    config_cls = _config_class(name)
    model_cls = _model_class(config_cls, name)
    error: Exception | None = None
    for limit in (TINY_ELEMENTS, HUGE_ELEMENTS):
        for divisor in _DIVISORS:
            config = config_cls(**_ARGUMENTS.get(name, {}))
            try:
                _shrink(config, divisor)
                fresh = _constructor(model_cls, (config,), {})
                if (elements := _elements(fresh)) > limit:
                    raise ValueError(f"{elements} elements, with widths divided by {divisor}")
                with torch.random.fork_rng():
                    fresh()()  # finds more errors than the meta device, which computes nothing
                return Case("transformers", name, fresh)
            except Exception as caught:
                error = caught
    assert error is not None
    raise error


def _elements(fresh: Callable[[], Callable[[], nn.Module]]) -> int:
    with torch.random.fork_rng(), torch.device("meta"):
        return sum(tensor.numel() for tensor in fresh()().state_dict().values())


def _config_class(name: str) -> type:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[name]


def _model_class(config_cls: type, name: str) -> type[nn.Module]:
    """The headless model, or another model that takes the configuration."""
    from transformers import AutoModel, PreTrainedModel
    from transformers.models.auto import modeling_auto

    mapped: Any = AutoModel._model_mapping.get(config_cls, None)
    if mapped is not None:
        return mapped[0] if isinstance(mapped, tuple) else mapped
    for attribute in sorted(vars(modeling_auto)):
        mapping = getattr(modeling_auto, attribute)
        if (
            attribute.startswith("MODEL_")
            and attribute.endswith("_MAPPING")
            and config_cls in mapping
        ):
            mapped = mapping[config_cls]
            return mapped[0] if isinstance(mapped, tuple) else mapped
    module = importlib.import_module(config_cls.__module__.replace("configuration_", "modeling_"))
    for cls in vars(module).values():
        if (
            inspect.isclass(cls)
            and issubclass(cls, PreTrainedModel)
            and cls.config_class is config_cls
        ):
            return cls
    part = getattr(module, config_cls.__name__.removesuffix("Config"), None)  # a part of a model
    if part is not None and list(inspect.signature(part).parameters) == ["config"]:
        return part
    raise LookupError(f"no model takes the configuration {name}")


def _shrink(config: Any, divisor: int, seen: set[int] | None = None) -> None:
    """Makes every size in ``config`` and the configurations in it small, in place."""
    from transformers import PretrainedConfig

    seen = seen if seen is not None else set()
    if id(config) in seen:
        return
    seen.add(id(config))
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _shrink(value, divisor, seen)
        elif isinstance(value, list | tuple) and value:
            setattr(config, name, type(value)(_shrink_list(name, list(value), divisor)))
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, _shrink_number(name, value, divisor))


def _shrink_number(name: str, value: int, divisor: int, count: int = 2) -> int:
    if name.endswith(("_token_id", "_index")):
        return min(value, 3)
    if any(part in name for part in _TABLES):
        return min(value, 128)
    if name.endswith("kv_shared_layers"):
        return 0
    if name == "depth" or (
        any(part in name for part in _COUNTS) and not any(part in name for part in _NOT_COUNTS)
    ):
        return min(value, count)
    if _is_width(name) and value >= 2 * divisor and value % divisor == 0:
        return value // divisor
    return value


def _shrink_list(name: str, values: list[Any], divisor: int) -> list[Any]:
    if name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        return [values[0], values[-1]] if len(values) > 2 else values
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return [_shrink_number(name, value, divisor, count=3) for value in values]
    return values


def _is_width(name: str) -> bool:
    return any(part in name for part in _WIDTHS) and not any(part in name for part in _NOT_WIDTHS)
