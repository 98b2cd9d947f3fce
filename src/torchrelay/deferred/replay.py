"""Running recorded operations: which are needed for a region, in which order, and where their results go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred.generators import Generators
from torchrelay.deferred.graph import Constant, External, Node, Region, Storage, map_tensors
from torchrelay.deferred.operators import describe
from torchrelay.errors import UnavailableError

__all__ = ["END", "Replay", "needed", "writers"]

END = 1 << 62  # a place in the program after every operation


class Replay:
    """One materialization, of one tensor or of a whole module.

    Results of operations that are run for good stay with their storages; those of a temporary evaluation
    (:meth:`values`) live in ``_scratch`` until it ends.

    Args:
        device: where to run what was recorded for a device that this machine does not have.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._instead = device
        self.generators = Generators(self._run_for_draw)
        self._scratch: dict[Storage, torch.UntypedStorage] | None = None

    def storage(self, storage: Storage) -> torch.UntypedStorage:
        """The memory of ``storage`` with everything written so far; its operations are run for good."""
        self._run_all(needed([(storage, None)]))
        return self._memory(storage)

    def values(self, region: Region, before: int | None = None) -> torch.Tensor:
        """The values of ``region`` now, or at an earlier place in the program. The operations stay to be run."""
        outer, self._scratch = self._scratch, {}
        try:
            self._run_all(needed([(region.storage, before)], readers=False))
            return region.over(self._memory(region.storage))
        finally:
            self._scratch = outer

    def place(self, device: torch.device) -> torch.device:
        """Where what was recorded for ``device`` is to be.

        Raises:
            UnavailableError: it is not on this machine, and no other was given.
        """
        if device.type == "cpu" or _torch.device_available(device):
            return device
        if self._instead is None:
            raise UnavailableError(
                f"The tensors were recorded on {device}, which this machine does not have. "
                "Materialize on a machine that has it, or give materialize_module(..., device='cpu')."
            )
        return self._instead

    # Running.

    def _run_for_draw(self, node: Node) -> None:
        outer, self._scratch = self._scratch, {}
        try:
            self._run_all([*needed([], [node], readers=False), node])
        finally:
            self._scratch = outer

    def _run_all(self, nodes: Iterable[Node]) -> None:
        with _torch.plain_torch():
            for node in nodes:
                self._run(node)

    def _run(self, node: Node) -> None:
        args, kwargs = node.args, node.kwargs

        def real(value: Region | External | Constant) -> torch.Tensor:
            if type(value) is Region:
                return value.over(self._memory(value.storage))
            return value.tensor.clone() if type(value) is Constant else value.get(node)  # type: ignore[union-attr]

        args = map_tensors(args, (Region, External, Constant), real)
        kwargs = map_tensors(kwargs, (Region, External, Constant), real)
        if isinstance(kwargs.get("device"), torch.device):
            kwargs = {**kwargs, "device": self.place(kwargs["device"])}
        with _torch.default_dtype(node.default_dtype):
            draws = node.position is not None
            result = self._draw(node, args, kwargs) if draws else node.func(*args, **kwargs)
        self._keep(node, result)

    def _draw(self, node: Node, args: Any, kwargs: Any) -> Any:
        assert node.position is not None and node.after is not None
        generator = self.generators.at(node.position)
        func = describe(node.func).with_generator
        if func is not None:
            result = func(*args, **{**kwargs, "generator": generator})
        else:
            with _torch.default_generator_as(generator):
                result = node.func(*args, **kwargs)
        self.generators.drawn(node.position.origin.device, node.after)
        return result

    def _keep(self, node: Node, result: Any) -> None:
        if node.outputs:
            results = [result] if isinstance(result, torch.Tensor) else flatten(result)
            for region, value in zip(node.outputs, results, strict=True):
                if region is not None:
                    self._bind(region, value)
        if self._scratch is None:
            node.finish()

    def _bind(self, region: Region, value: torch.Tensor) -> None:
        """Makes the new tensor ``value`` the memory of ``region``'s storage."""
        if (value.stride(), value.storage_offset()) != (
            region.stride,
            region.offset,
        ) or value.untyped_storage().nbytes() != region.storage.size_bytes:
            laid_out = torch.empty_strided(region.size, region.stride, dtype=value.dtype, device=value.device)
            value = laid_out.copy_(value)
        self._put(region.storage, value.untyped_storage())

    def _put(self, storage: Storage, real: torch.UntypedStorage) -> None:
        if self._scratch is None:
            storage.real = real
        else:
            self._scratch[storage] = real

    def _memory(self, storage: Storage) -> torch.UntypedStorage:
        if self._scratch is not None:
            found = self._scratch.get(storage)
            if found is None and storage.real is not None:
                found = self._scratch[storage] = storage.real.clone()  # type: ignore[no-untyped-call]
            if found is not None:
                return found
        elif storage.real is not None:
            return storage.real
        empty = torch.empty(
            storage.size_bytes, dtype=torch.uint8, device=self.place(storage.device)
        ).untyped_storage()
        self._put(storage, empty)
        return empty


def flatten(result: Any) -> list[Any]:
    """The results of an operation, in order, lists among them opened."""
    if isinstance(result, (tuple, list)):
        return [item for value in result for item in flatten(value)]
    return [result]


def needed(
    storages: Iterable[tuple[Storage, int | None]], nodes: Iterable[Node] = (), readers: bool = True
) -> list[Node]:
    """The operations to run, in program order, for the state that ``storages`` have at a place in the program.

    Args:
        storages: pairs of a storage and a ``seq`` before which its writers count; None: all of them.
        nodes: operations that will be run, whose arguments must be ready.
        readers: with those that read what is about to be overwritten, if their results may still be wanted.
    """
    chosen: dict[int, Node] = {}
    asked: set[tuple[Storage, int]] = set()
    todo: list[tuple[Storage, int]] = [(s, END if seq is None else seq) for s, seq in storages]
    for node in nodes:
        todo.extend((storage, node.seq) for storage in _inputs(node))
    while todo:
        storage, before = question = todo.pop()
        if question in asked:
            continue
        asked.add(question)
        for node in writers(storage, before):
            if node.seq in chosen:
                continue
            chosen[node.seq] = node
            for earlier in [node, *(_pending_readers(node) if readers else ())]:
                chosen[earlier.seq] = earlier
                todo.extend((source, earlier.seq) for source in _inputs(earlier))
    return [chosen[seq] for seq in sorted(chosen)]


def writers(storage: Storage, before: int) -> list[Node]:
    """The writers of ``storage`` that decide its content before ``before``, in order: none that is wholly overwritten."""
    history = storage.history()
    chosen: list[Node] = []
    for node in reversed(history):
        if node.seq >= before:
            continue
        chosen.append(node)
        if overwrites(node, storage):
            break
    chosen.reverse()
    return chosen


def overwrites(node: Node, storage: Storage) -> bool:
    """Whether nothing of what ``storage`` held before ``node`` is left after it."""
    if not describe(node.func).fills:
        return any(region is not None and region.storage is storage for region in node.outputs)
    target = node.writes[0]
    return (
        target.storage is storage
        and target.is_whole
        and not any(region.storage is storage for region in node.reads)
        and sum(argument is target for argument in node.args) == 1
    )


def _inputs(node: Node) -> Iterator[Storage]:
    """The storages whose content ``node`` depends on."""
    for region in node.reads:
        yield region.storage
    for region in node.writes:
        if not overwrites(node, region.storage):
            yield region.storage


def _pending_readers(node: Node) -> list[Node]:
    """Operations before ``node`` that read what it overwrites and whose results somebody may still want."""
    found = []
    for region in node.writes:
        for reference in region.storage.readers:
            reader = reference()
            if reader is not None and not reader.done and reader.seq < node.seq:
                found.append(reader)
    return found
