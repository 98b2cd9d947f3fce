"""Collectives and messages of one group, between the caller's tensors and a data plane.

Every collective has the same steps: arguments to plain buffers, one or more calls of the data
plane, a Work. A call that c10d marks as synchronous runs in the calling thread and raises at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchrelay.aggregation import _calls as calls
from torchrelay.aggregation._calls import Tensors
from torchrelay.aggregation._dtypes import NATIVE, as_native
from torchrelay.aggregation._plane import ANY_RANK, Op, Plane, Ticket
from torchrelay.aggregation._sparse import all_reduce_sparse
from torchrelay.aggregation._staging import Staging, is_plain
from torchrelay.aggregation._work import DoneWork, PendingWork, TransferWork, seconds
from torchrelay.errors import ArgumentError

__all__ = ["Collectives"]

Launch = Callable[[float, bool], Ticket | None]

_ANY_DTYPE = (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX)
_DONE = DoneWork()


class Collectives:
    """The collectives of a group, on parsed arguments.

    ``opts`` is the options object that c10d has for the collective, or None for its defaults.

    Args:
        plane: owned, and closed by :meth:`close`.
        timeout_s: for calls that give none.
    """

    def __init__(self, plane: Plane, rank: int, size: int, timeout_s: float) -> None:
        self.plane = plane
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.count = 0
        self._pending: deque[PendingWork] = deque()
        self._coalescing: list[PendingWork] | None = None

    # --- reductions

    def all_reduce_now(self, tensor: torch.Tensor, opts: Any) -> dist.Work | None:
        """Run the most common call by the shortest path; return None for other calls."""
        native_op, given, block = calls.asked(opts)
        if not (block and native_op in _ANY_DTYPE and tensor.dtype in NATIVE and is_plain(tensor)):
            return None
        self.count += 1
        timeout_s = self.timeout_s if given.days < 0 else seconds(given, self.timeout_s)
        self.plane.all_reduce(tensor, native_op, timeout_s, True)
        return _DONE

    def all_reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        op, given, _ = calls.asked(opts)
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return self._all_reduce_sparse(tensors, op, seconds(given, self.timeout_s))
        staging = Staging()
        launches = []
        for tensor in tensors:
            buffer, buffer_op = _reducible(staging.inout(tensor), op, in_place=True)
            launches.append(lambda t, b, x=buffer, o=buffer_op: self.plane.all_reduce(x, o, t, b))
        return self._run(launches, opts, tensors, staging)

    def _all_reduce_sparse(self, tensors: Tensors, op: Op | float, timeout_s: float) -> dist.Work:
        """Sum sparse tensors. Blocks: sizes differ between ranks, so the second gather needs the
        first.
        """
        self.count += 1
        for tensor in tensors:
            all_reduce_sparse(self.plane, self.size, tensor, op, timeout_s)
        return DoneWork(tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        op, _, _ = calls.asked(opts)
        root = calls.root_of(opts, self.size, "reduce")
        tensor = calls.single(tensors, "reduce")
        staging = Staging()
        buffer = staging.inout(tensor) if self.rank == root else staging.input(tensor)
        native, native_op = _reducible(buffer, op, in_place=self.rank == root)
        staging.kept.append(native)
        return self._run(
            [lambda t, b: self.plane.reduce(native, native_op, root, t, b)], opts, tensors, staging
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        op, _, _ = calls.asked(opts)
        staging = Staging()
        launches = []
        for output, blocks in zip(outputs, inputs, strict=True):
            calls.one_block_a_rank(blocks, self.size, output, "reduce_scatter")
            into, native_op = _reducible(staging.output(output), op, in_place=True, scale=False)
            sources = [_reducible(staging.input(block), op, in_place=False)[0] for block in blocks]
            staging.kept += sources
            launches.append(
                lambda t, b, x=into, y=sources, o=native_op: self.plane.reduce_scatter(
                    x, y, o, t, b
                )
            )
        return self._run(launches, opts, outputs, staging)

    def reduce_scatter_tensors(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        blocks = [
            calls.split(tensor, self.size, output, "reduce_scatter_tensor")
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self.reduce_scatter(outputs, blocks, opts)

    def reduce_scatter_tensor(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any
    ) -> dist.Work:
        return self.reduce_scatter_tensors([output], [tensor], opts)

    # --- copies

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        staging = Staging()
        root = calls.root_of(opts, self.size, "broadcast")
        is_root = root == self.rank
        buffers = [
            staging.input(tensor) if is_root else staging.output(tensor) for tensor in tensors
        ]
        launches = [
            lambda t, b, x=buffer: self.plane.broadcast(x, root, t, b) for buffer in buffers
        ]
        return self._run(launches, opts, tensors, staging)

    def all_gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        staging = Staging()
        launches = []
        for targets, tensor in zip(outputs, inputs, strict=True):
            calls.same_dtype([*targets, tensor], "all_gather")
            buffers = [
                staging.output(out)
                for out in calls.one_a_rank(targets, self.size, "all_gather", "outputs")
            ]
            source = staging.input(tensor)
            launches.append(lambda t, b, x=buffers, y=source: self.plane.all_gather(x, y, t, b))
        return self._run(launches, opts, [t for targets in outputs for t in targets], staging)

    def all_gather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any
    ) -> dist.Work:
        """Gather several inputs; ``outputs`` is a list for each rank, not for each input."""
        return self.all_gather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_tensors(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        staging = Staging()
        launches = []
        for output, tensor in zip(outputs, inputs, strict=True):
            calls.same_dtype([output, tensor], "all_gather_into_tensor")
            blocks = calls.split(
                staging.output(output), self.size, tensor, "all_gather_into_tensor"
            )
            source = staging.input(tensor)
            launches.append(lambda t, b, x=blocks, y=source: self.plane.all_gather(x, y, t, b))
        return self._run(launches, opts, outputs, staging)

    def all_gather_tensor(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> dist.Work:
        return self.all_gather_tensors([output], [tensor], opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        root = calls.root_of(opts, self.size, "gather")
        tensor = calls.single(inputs, "gather")
        staging = Staging()
        targets = (
            calls.on_root(outputs, self.size, "gather", "outputs") if self.rank == root else []
        )
        calls.same_dtype([*targets, tensor], "gather")
        buffers = [staging.output(output) for output in targets]
        source = staging.input(tensor)
        return self._run(
            [lambda t, b: self.plane.gather(buffers, source, root, t, b)], opts, targets, staging
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        root = calls.root_of(opts, self.size, "scatter")
        output = calls.single(outputs, "scatter")
        staging = Staging()
        sources = calls.on_root(inputs, self.size, "scatter", "inputs") if self.rank == root else []
        calls.same_dtype([*sources, output], "scatter")
        blocks = [staging.input(source) for source in sources]
        into = staging.output(output)
        return self._run(
            [lambda t, b: self.plane.scatter(into, blocks, root, t, b)], opts, outputs, staging
        )

    def all_to_all(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        calls.same_dtype([*outputs, *inputs], "all_to_all")
        staging = Staging()
        into = [
            staging.output(out)
            for out in calls.one_a_rank(outputs, self.size, "all_to_all", "outputs")
        ]
        blocks = [
            staging.input(block)
            for block in calls.one_a_rank(inputs, self.size, "all_to_all", "inputs")
        ]
        return self._run(
            [lambda t, b: self.plane.all_to_all(into, blocks, t, b)], opts, outputs, staging
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> dist.Work:
        calls.same_dtype([output, tensor], "all_to_all_single")
        staging = Staging()
        into = calls.split_rows(staging.output(output), self.size, output_splits, "output")
        blocks = calls.split_rows(staging.input(tensor), self.size, input_splits, "input")
        return self._run(
            [lambda t, b: self.plane.all_to_all(into, blocks, t, b)], opts, [output], staging
        )

    # --- synchronisation and messages

    def barrier(self, opts: Any) -> dist.Work:
        return self._run([self.plane.barrier], opts, [], Staging())

    def barrier_within(self, timeout: timedelta | None) -> dist.Work:
        self.count += 1
        self.plane.barrier(seconds(timeout, self.timeout_s), True)
        return _DONE

    def send(self, tensors: Tensors, to: int, tag: int) -> dist.Work:
        tensor = calls.single(tensors, "send")
        calls.check_rank(to, self.size, "send")
        calls.check_tag(tag, "send")
        staging = Staging()
        transfer = self.plane.send(staging.input(tensor), to, tag, self.timeout_s)
        return self._keep(TransferWork(self.plane, transfer, tensors, staging.kept))

    def receive(self, tensors: Tensors, source: int, tag: int) -> dist.Work:
        calls.check_rank(source, self.size, "recv")
        return self._receive(tensors, source, tag)

    def receive_from_any(self, tensors: Tensors, tag: int) -> dist.Work:
        return self._receive(tensors, ANY_RANK, tag)

    def _receive(self, tensors: Tensors, source: int, tag: int) -> dist.Work:
        tensor = calls.single(tensors, "recv")
        calls.check_tag(tag, "recv")
        staging = Staging()
        transfer = self.plane.receive(staging.output(tensor), source, tag, self.timeout_s)
        return self._keep(TransferWork(self.plane, transfer, tensors, staging.kept, staging.finish))

    def start_coalescing(self) -> None:
        self._coalescing = []

    def end_coalescing(self) -> dist.Work:
        """Return one Work for all operations since :meth:`start_coalescing`."""
        works, self._coalescing = self._coalescing or [], None
        tickets = [ticket for work in works for ticket in work._tickets]
        if not tickets:
            return _DONE

        def finish() -> None:
            for work in works:
                work.wait()

        return self._keep(PendingWork(tickets, [], works, finish))

    def close(self) -> None:
        self.plane.close()
        self._pending.clear()

    # --- common to all

    def _run(
        self, launches: Sequence[Launch], opts: Any, tensors: Tensors, staging: Staging
    ) -> dist.Work:
        timeout_s = seconds(None if opts is None else opts.timeout, self.timeout_s)
        block = opts is not None and not getattr(opts, "asyncOp", True) and self._coalescing is None
        self.count += 1
        tickets = [
            ticket for launch in launches if (ticket := launch(timeout_s, block)) is not None
        ]
        finish = staging.finish
        if not tickets:
            if finish is not None:
                finish()
            return DoneWork(tensors)
        return self._keep(PendingWork(tickets, tensors, staging.kept, finish))

    def _keep(self, work: PendingWork) -> PendingWork:
        """Keep the tensors of operations in progress alive, also if the caller drops the Work."""
        pending = self._pending
        while pending and not pending[0].in_progress:
            pending.popleft()
        pending.append(work)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work


def _reducible(
    buffer: torch.Tensor, op: Op | float, in_place: bool, scale: bool = True
) -> tuple[torch.Tensor, Op]:
    """Return a tensor and op that the data plane can reduce.

    A factor is multiplied in before, into a copy if the caller keeps its tensor.
    """
    if isinstance(op, Op):
        return as_native(buffer, op)
    if not (buffer.is_floating_point() or buffer.is_complex()):
        raise ArgumentError(
            f"PREMUL_SUM of {buffer.dtype} is not defined: it needs a floating-point dtype"
        )
    if scale:
        with torch.no_grad():
            buffer = buffer.mul_(op) if in_place else buffer.mul(op)
    return as_native(buffer, Op.SUM)
