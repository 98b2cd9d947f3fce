"""The dealing of samples to members that change: none is lost, none is taken twice in an epoch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from torchrelay._names import names_options
from torchrelay.errors import ArgumentError

if TYPE_CHECKING:
    from torchrelay.training._elastic import Step

__all__ = ["ElasticLoader"]


class ElasticLoader:
    """Batches of a map-style dataset, of which each member takes a part.

    The samples of an epoch are in one order for all members. A step takes the next ``batch_size``
    of them, whatever the number of members, who divide them evenly; the last batch of an epoch is
    smaller. A step that is not committed takes the same samples again. The position heals with the
    rest of the state: pass the loader to :class:`Elastic`.

    Args:
        dataset: with ``len`` and indices, equal on all members.
        batch_size: of all members together.
        shuffle: draw another order for each epoch, from ``seed``.
        options: of ``DataLoader``, such as ``num_workers`` and ``collate_fn``.
    """

    @names_options("collate_fn", "num_workers", "pin_memory", "prefetch_factor", "timeout")
    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if not (len(dataset) and batch_size > 0):
            raise ArgumentError("ElasticLoader: it needs samples, and a batch_size of at least 1")
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.epoch, self.position = 0, 0
        self._options = options
        self._running: tuple[Any, Iterator[Any]] | None = None
        self._last: Callable[[], Step | None] = lambda: None
        self._order: tuple[int, list[int]] = -1, []

    @property
    def about(self) -> str:
        """What must be equal on all members."""
        order = "shuffled" if self.shuffle else "in order"
        return f"{len(self.dataset)} samples in batches of {self.batch_size}, {order}"

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
        self._running = None

    def take(self, step: Step) -> Any:
        """Return this member's part of the batch of ``step``; None if it has no sample of it. The
        position advances if the step commits.

        Raises:
            ArgumentError: it has already been called in this step, or the step's block has ended.
        """
        if self._last() is step:
            raise ArgumentError(
                "ElasticLoader.take: this step has its batch; to accumulate the gradients of "
                "several, make batch_size larger and split what take returns"
            )
        self._last = weakref.ref(step)
        rank, size = step.rank, step.size
        at = self.epoch, self.position, rank, size
        if self._running is None or self._running[0] != at:
            self._running = None  # workers that are forked must not have the former ones
            parts: Any = self._parts(*at)
            loader = DataLoader(self.dataset, batch_sampler=parts, **self._options)
            self._running = at, iter(loader)
        batches = self._running[1]
        indices = self._batch(self.epoch, self.position)
        part = indices[rank::size]
        following = self._following(self.epoch, self.position)

        def advance() -> None:
            self.epoch, self.position = following
            self._running = (*following, rank, size), batches

        step.on_commit(advance)
        batch = next(batches) if part else None
        self._running = None  # what was taken is taken again if the step does not commit
        step.samples = len(part)
        return batch

    def samples(self, number: int) -> Sequence[int]:
        """Return the samples that all members together take in step ``number``, if the loader began
        with step 0.
        """
        steps = -(-len(self.dataset) // self.batch_size)
        return self._batch(number // steps, number % steps * self.batch_size)

    def _parts(self, epoch: int, position: int, rank: int, size: int) -> Iterator[Sequence[int]]:
        while True:
            part = self._batch(epoch, position)[rank::size]
            if part:
                yield part
            epoch, position = self._following(epoch, position)

    def _following(self, epoch: int, position: int) -> tuple[int, int]:
        position += self.batch_size
        return (epoch, position) if position < len(self.dataset) else (epoch + 1, 0)

    def _batch(self, epoch: int, position: int) -> Sequence[int]:
        if not self.shuffle:
            return range(position, min(position + self.batch_size, len(self.dataset)))
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._order = epoch, torch.randperm(len(self.dataset), generator=generator).tolist()
        return self._order[1][position : position + self.batch_size]
