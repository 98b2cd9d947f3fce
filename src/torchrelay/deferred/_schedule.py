"""The recorded operations that decide the state of a storage at a place in the program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchrelay.deferred._graph import History, Node, Storage, StorageRecord

__all__ = ["END", "Schedule", "writers"]

END = 1 << 62  # a place in the program after every operation


class Schedule:
    """The operations to run for some states, in program order.

    A state is requested by its storage and a place in the program: before an operation, or at the
    end. If the storage's memory holds an earlier state, only the operations in between are run. If
    it holds a later state than one of those requested, it is dropped. If it was handed out, the
    storage is computed in the memory of a history of its own.

    Args:
        materialization: the caller; memory that it handed out itself has not been changed since.
        cached: whether memory that exists is used; if not, it is not touched either.

    Attributes:
        nodes: the operations, in order.
        last_uses: for each storage asked for, the latest place.
        histories: those in whose memory they are computed, which are needed until then.
        records: of the storages asked for, also operations that were overwritten.
    """

    def __init__(
        self,
        states: Iterable[tuple[Storage, int]] = (),
        nodes: Iterable[Node] = (),
        *,
        materialization: int = 0,
        cached: bool = True,
    ) -> None:
        self._materialization = materialization
        self._cached = cached
        self._chosen: dict[int, Node] = {}
        self._asked: dict[Storage, set[int]] = {}
        self._todo: list[tuple[Storage, int]] = list(states)
        self.histories: dict[Storage, History] = {}
        self.records: list[StorageRecord] = []
        for node in nodes:
            self._choose(node)
        while self._todo:
            self._answer(*self._todo.pop())
        self.nodes = [self._chosen[seq] for seq in sorted(self._chosen)]
        self.last_uses = {storage: max(places) for storage, places in self._asked.items()}

    def history(self, storage: Storage) -> History:
        """Return the history in whose memory ``storage`` is computed."""
        found = self.histories.get(storage)
        if found is None:
            found = storage.history()
            if not self._cached:
                found = History(storage, found.record)
            self.histories[storage] = found
            self.records.append(found.record)
        return found

    def _choose(self, node: Node) -> None:
        if node.seq not in self._chosen:
            self._chosen[node.seq] = node
            self._todo.extend((storage, node.seq) for storage in _inputs(node))

    def _answer(self, storage: Storage, before: int) -> None:
        places = self._asked.setdefault(storage, set())
        if before in places:
            return
        places.add(before)
        history = self.history(storage)
        needed = writers(storage, before)
        if history.real is not None:
            if history.holds(needed[-1].seq if needed else 0, self._materialization):
                needed = [node for node in needed if node.seq > history.version]
            else:
                history.drop()
                if history.escaped is not None:
                    self.histories[storage] = History(storage, history.record)
                self._todo.extend((storage, place) for place in places)
                places.clear()
                return
        for node in needed:
            self._choose(node)


def writers(storage: Storage, before: int) -> list[Node]:
    """Return the writers of ``storage`` that decide its content before ``before``, in order.

    What is wholly overwritten later is not among them.
    """
    chosen: list[Node] = []
    for node in reversed(storage.history().record):
        if node.seq >= before:
            continue
        chosen.append(node)
        if _overwrites(node, storage):
            break
    chosen.reverse()
    return chosen


def _overwrites(node: Node, storage: Storage) -> bool:
    """Return whether ``node`` leaves nothing of what ``storage`` held before."""
    if node.overwrites:
        return node.writes[0].storage is storage
    return any(region is not None and region.storage is storage for region in node.outputs)


def _inputs(node: Node) -> Iterator[Storage]:
    """Yield the storages whose content ``node`` depends on."""
    for region in node.reads:
        yield region.storage
    for region in node.writes:
        if not _overwrites(node, region.storage):
            yield region.storage
