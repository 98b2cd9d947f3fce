"""Checks that deferred modules of the zoo equal eager ones bit for bit; as a command, checks all of
them.

``python tests/zoo_check.py`` checks every case in every shard and writes
``benchmarks/results/deferred_zoo.md``; ``python tests/zoo_check.py NAME...`` checks the cases whose
names contain a NAME and prints what differs.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import zoo
from torchrelay.deferred import deferred_init, is_deferred, materialize_module, materialize_tensor

__all__ = ["SHARD_COUNTS", "check_shard", "check_whole", "eager"]

SHARD_COUNTS = (2, 3, 7)
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "deferred_zoo.md"


class DifferentError(AssertionError):
    """A deferred module is not the eager one; the message names the tensor and what differs."""


def _seed() -> None:
    torch.manual_seed(20)
    random.seed(20)
    np.random.seed(20)


def eager(case: zoo.Case) -> tuple[nn.Module, torch.Tensor]:
    """The module as torch makes it, and the state of the generator afterwards."""
    build = case.fresh()
    _seed()
    module = build()
    return module, torch.get_rng_state()


def deferred(case: zoo.Case, end_state: torch.Tensor) -> nn.Module:
    """The module deferred, after the same seed; the generator must end the same."""
    build = case.fresh()
    _seed()
    module = deferred_init(build)
    if not torch.equal(torch.get_rng_state(), end_state):
        raise DifferentError("the generator's state after deferred_init")
    return module


def tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers (non-persistent ones too) and tensors that are plain attributes, tied
    ones under each name.
    """
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        for name, value in vars(submodule).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}", value


def check_whole(case: zoo.Case, reference: nn.Module, end_state: torch.Tensor, seed: int) -> None:
    """One tensor after the other in shuffled order, each equal to ``reference``'s, with the same
    ties.
    """
    module = deferred(case, end_state)
    order = [tensor for _, tensor in tensors(module)]
    random.Random(seed).shuffle(order)
    for tensor in order:
        materialize_tensor(tensor)
    materialize_module(module)
    _compare_structure(module, reference)
    expected = dict(tensors(reference))
    for name, tensor in tensors(module):
        _compare(name, tensor, expected[name], layout=True)
    if not torch.equal(torch.get_rng_state(), end_state):
        raise DifferentError("the generator's state after materialization")


def check_shard(
    case: zoo.Case, reference: nn.Module, end_state: torch.Tensor, count: int, index: int, seed: int
) -> None:
    """Rows of each tensor, ``index`` of ``count`` equal parts, module after module in shuffled
    order.

    Real tensors that were given to the constructor stay whole.
    """
    module = deferred(case, end_state)
    given = {name for name, tensor in tensors(module) if not is_deferred(tensor)}
    order = list(module.modules())
    random.Random(seed).shuffle(order)

    def shard(name: str, fake: torch.Tensor) -> tuple[slice, ...] | None:
        return (_part(len(fake), count, index),) if fake.dim() else None

    for target in order:
        materialize_module(target, check_fn=lambda one, target=target: one is target, shard=shard)  # type: ignore[misc]
    expected: dict[str, torch.Tensor] = {**dict(reference.named_parameters(remove_duplicate=False))}
    expected.update(reference.named_buffers(remove_duplicate=False))
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        whole = expected[name]
        part = whole
        uninitialized = isinstance(whole, nn.parameter.UninitializedTensorMixin)  # type: ignore[attr-defined]
        if name not in given and not uninitialized and whole.dim():
            part = whole[_part(len(whole), count, index)]
        _compare(name, tensor, part, layout=False)


def _part(rows: int, count: int, index: int) -> slice:
    return slice(index * rows // count, (index + 1) * rows // count)


def _compare_structure(module: nn.Module, reference: nn.Module) -> None:
    for what, view in (
        ("names", lambda one: [name for name, _ in tensors(one)]),
        ("names in the state dict", lambda one: list(one.state_dict())),
        ("ties", lambda one: _groups(one, id)),
        ("tensors that share memory", lambda one: _groups(one, _storage)),
        ("training flags", lambda one: [submodule.training for submodule in one.modules()]),
    ):
        if view(module) != view(reference):
            raise DifferentError(f"{what}: {view(module)} instead of {view(reference)}"[:500])


def _groups(module: nn.Module, key: Callable[[torch.Tensor], Any]) -> list[list[str]]:
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors(module):
        groups.setdefault(key(tensor), []).append(name)
    return sorted(groups.values())


def _storage(tensor: torch.Tensor) -> int:
    if (
        isinstance(tensor, nn.parameter.UninitializedTensorMixin)  # type: ignore[attr-defined]
        or tensor.layout is not torch.strided
    ):
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _facts(tensor: torch.Tensor, layout: bool) -> dict[str, Any]:
    facts = {"class": type(tensor), "dtype": tensor.dtype, "device": tensor.device}
    facts.update(requires_grad=tensor.requires_grad, leaf=tensor.is_leaf)
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):  # type: ignore[attr-defined]
        return facts
    facts.update(shape=tensor.shape)
    if layout:
        facts.update(
            stride=tensor.stride(), offset=tensor.storage_offset(), attributes=sorted(vars(tensor))
        )
    return facts


def _compare(name: str, tensor: torch.Tensor, expected: torch.Tensor, layout: bool) -> None:
    ours, theirs = _facts(tensor, layout), _facts(expected, layout)
    if not layout:  # a slice of a parameter is no parameter
        for facts in (ours, theirs):
            facts.pop("class"), facts.pop("leaf")
    if ours != theirs:
        differing = {
            key: (ours.get(key), theirs.get(key)) for key in theirs if ours.get(key) != theirs[key]
        }
        raise DifferentError(f"{name}: {differing}")
    if "shape" in ours and not torch.equal(_bytes(tensor), _bytes(expected)):
        wrong = (tensor != expected).sum().item()
        raise DifferentError(
            f"{name}: {wrong} of {expected.numel()} values of shape {tuple(expected.shape)}"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def is_reproducible(case: zoo.Case) -> bool:
    """Whether eager construction gives the same values twice; it does not if it leaves memory
    uninitialized.
    """
    one, other = eager(case)[0], eager(case)[0]
    try:
        _compare_structure(one, other)
        for (name, first), (_, second) in zip(tensors(one), tensors(other), strict=True):
            _compare(name, first, second, layout=True)
    except DifferentError:
        return False
    return True


def check(case: zoo.Case, seed: int = 1, all_shards: bool = True) -> None:
    """Whole, then every shard of :data:`SHARD_COUNTS`, or one shard of each."""
    reference, end_state = eager(case)
    check_whole(case, reference, end_state, seed)
    for count in SHARD_COUNTS:
        indexes = (
            range(count) if all_shards else [random.Random(f"{case}/{count}").randrange(count)]
        )
        for index in indexes:
            try:
                check_shard(case, reference, end_state, count, index, seed + index)
            except Exception as error:
                raise type(error)(f"as shard {index} of {count}: {error}") from error


def _cases(names: Sequence[str]) -> Iterator[zoo.Case | tuple[str, str]]:
    for case in zoo.torch_cases():
        if not names or any(name in str(case) for name in names):
            yield case
    wanted = [
        one
        for one in zoo.transformers_types()
        if not names or any(n in f"transformers-{one}" for n in names)
    ]
    yield from zoo.transformers_cases(wanted) if wanted else ()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help="parts of names of cases; none: all, and write the results file"
    )
    parser.add_argument(
        "--one-shard", action="store_true", help="check one shard of each number of shards"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    passed: dict[str, int] = {"torch": 0, "transformers": 0}
    unbuilt: list[tuple[str, str]] = []
    failed: list[tuple[str, str]] = []
    start = time.monotonic()
    for number, case in enumerate(_cases(options.names)):
        if number % 100 == 0:
            print(f"{number} cases, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if isinstance(case, tuple):
            unbuilt.append(case)
            continue
        try:
            check(case, all_shards=not options.one_shard)
            passed[case.family] += 1
        except Exception as error:
            note = "" if is_reproducible(case) else " (eager itself differs from run to run)"
            failed.append((str(case), f"{zoo.reason(error)}{note}"))
            print(*failed[-1], flush=True)
    text = _report(passed, failed, unbuilt, time.monotonic() - start, options.one_shard)
    print(text)
    if not options.names:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(text)
    return bool(failed)


def _report(
    passed: dict[str, int], failed: Any, unbuilt: Any, seconds: float, one_shard: bool
) -> str:
    import transformers

    shards = "one shard each" if one_shard else "every shard"
    lines = [
        "# The zoo: deferred modules against eager ones, bit for bit",
        "",
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}; "
        f"`{' '.join(['python', *sys.argv])}`, {seconds:.0f} s.",
        "",
        "Each case is compared whole, one tensor after the other in shuffled order, and as 1/2, "
        "1/3 and 1/7 of each "
        f"tensor's rows ({shards}), module after module in shuffled order: values, types, strides, "
        "ties, shared "
        "memory, non-persistent buffers, tensors that are plain attributes, and the generator's "
        "final state.",
        "",
        "| cases | build eagerly | pass |",
        "|---|---|---|",
    ]
    for family, what in (
        ("torch", "constructor calls of torch's module_db"),
        ("transformers", "configurations"),
    ):
        count = passed[family] + sum(name.startswith(f"{family}-") for name, _ in failed)
        lines.append(f"| {what} ({family}) | {count} | {passed[family]} |")
    lines += [
        "",
        "## Failures",
        "",
        *([f"- `{name}`: {reason}" for name, reason in failed] or ["None."]),
    ]
    lines += ["", "## Configurations that do not build eagerly here", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in unbuilt] or ["None."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
