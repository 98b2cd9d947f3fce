"""The process group that PyTorch sees: c10d's calls on one side, a plane on the other.

Every collective comes in the same order: arguments to plain buffers, one or more calls of the plane, a Work.
A call that c10d marks as synchronous runs in the calling thread and raises at once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchrelay.aggregation import _calls as calls
from torchrelay.aggregation._calls import Tensors
from torchrelay.aggregation._dtypes import NATIVE, as_native
from torchrelay.aggregation._plane import Op, Plane, PlaneStats, Ticket
from torchrelay.aggregation._sparse import all_reduce_sparse
from torchrelay.aggregation._staging import Staging, is_plain
from torchrelay.aggregation._work import DoneWork, PendingWork, TransferWork, seconds
from torchrelay.errors import ArgumentError
from torchrelay.telemetry import listening, span

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["LIVING", "SmlGroup"]

Launch = Callable[[float, bool], Ticket | None]

_ANY_DTYPE = (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX)
_DONE = DoneWork()
_AllreduceOptions = dist.AllreduceOptions

# c10d declares each method with overloads; here one method takes all forms.
_ProcessGroup: Any = dist.ProcessGroup
_AllgatherOptions: Any = dist.distributed_c10d.AllgatherOptions  # type: ignore[attr-defined]

LIVING: weakref.WeakSet[SmlGroup] = weakref.WeakSet()


class SmlGroup(_ProcessGroup):  # type: ignore[misc]
    """Ranks that communicate over one plane.

    Args:
        plane: the group owns it and closes it.
        store: the group's own.
        timeout_s: for calls that give none.
    """

    def __init__(self, plane: Plane, store: Store, rank: int, size: int, timeout_s: float) -> None:
        super().__init__(rank, size)
        self._plane = plane
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._name = self._desc = ""
        self._pending: deque[PendingWork] = deque()
        self._coalescing: list[PendingWork] | None = None
        self._calls = 0
        self._closed = False
        LIVING.add(self)

    # --- what a group says about itself

    def getBackendName(self) -> str:
        return "sml"

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    def get_group_store(self) -> Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def _set_sequence_number_for_group(self) -> None:
        """The count starts at 0 on every rank."""

    def stats(self) -> PlaneStats:
        return self._plane.stats()

    # --- reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> dist.Work:
        if type(opts) is not _AllreduceOptions:
            tensors = calls.one_or_more(tensors)
            opts = calls.reduction(_AllreduceOptions(), opts, op, timeout)
        native_op, given, block = calls.asked(opts)
        tensor = tensors[0]
        if (
            block
            and len(tensors) == 1
            and native_op in _ANY_DTYPE
            and tensor.dtype in NATIVE
            and is_plain(tensor)
        ):
            # The shortest way for the commonest call.
            self._calls += 1
            timeout_s = self._timeout_s if given.days < 0 else seconds(given, self._timeout_s)
            if listening():
                with span("aggregation.all_reduce", size_bytes=tensor.nbytes):
                    self._plane.all_reduce(tensor, native_op, timeout_s, True)
            else:
                self._plane.all_reduce(tensor, native_op, timeout_s, True)
            return _DONE
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return self._all_reduce_sparse(tensors, native_op, seconds(given, self._timeout_s))
        staging = Staging()
        launches = []
        for tensor in tensors:
            buffer, buffer_op = _reducible(staging.inout(tensor), native_op, in_place=True)
            launches.append(lambda t, b, x=buffer, o=buffer_op: self._plane.all_reduce(x, o, t, b))
        return self._run(launches, opts, tensors, staging)

    def _all_reduce_sparse(self, tensors: Tensors, op: Op | float, timeout_s: float) -> dist.Work:
        """Sizes differ from rank to rank, so the second gather needs the first: both end before this returns."""
        self._calls += 1
        with span("aggregation.all_reduce_sparse", tensors=len(tensors)):
            for tensor in tensors:
                all_reduce_sparse(self._plane, self._size, tensor, op, timeout_s)
        return DoneWork(tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(
        self, tensors: Any, root: Any = None, op: Any = None, timeout: Any = None, *, opts: Any = None
    ) -> dist.Work:
        tensors = calls.one_or_more(tensors)
        opts = calls.rooted(dist.ReduceOptions(), root, opts, op, timeout)
        op, _, _ = calls.asked(opts)
        root = int(opts.rootRank)
        tensor = calls.single(tensors, "reduce")
        staging = Staging()
        buffer = staging.inout(tensor) if self._rank == root else staging.input(tensor)
        native, native_op = _reducible(buffer, op, in_place=self._rank == root)
        staging.kept.append(native)
        return self._run(
            [lambda t, b: self._plane.reduce(native, native_op, root, t, b)], opts, tensors, staging
        )

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> dist.Work:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = calls.reduction(dist.ReduceScatterOptions(), opts, op, timeout)
        return self._reduce_scatter(list(zip(outputs, inputs, strict=True)), opts)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._reduce_scatter(
            [(output, calls.split(tensor, self._size, output, "reduce_scatter_tensor"))], opts
        )

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        pairs = [
            (output, calls.split(tensor, self._size, output, "reduce_scatter_tensor"))
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._reduce_scatter(pairs, opts)

    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(self, pairs: Sequence[tuple[torch.Tensor, Tensors]], opts: Any) -> dist.Work:
        op, _, _ = calls.asked(opts)
        staging = Staging()
        launches = []
        for output, inputs in pairs:
            calls.one_block_a_rank(inputs, self._size, output, "reduce_scatter")
            into, native_op = _reducible(staging.output(output), op, in_place=True, scale=False)
            blocks = [_reducible(staging.input(block), op, in_place=False)[0] for block in inputs]
            staging.kept += blocks
            launches.append(
                lambda t, b, x=into, y=blocks, o=native_op: self._plane.reduce_scatter(x, y, o, t, b)
            )
        return self._run(launches, opts, [output for output, _ in pairs], staging)

    # --- copies

    def broadcast(
        self, tensors: Any, root: Any = None, timeout: Any = None, *, opts: Any = None
    ) -> dist.Work:
        tensors = calls.one_or_more(tensors)
        opts = calls.rooted(dist.BroadcastOptions(), root, opts, None, timeout)
        staging = Staging()
        root = int(opts.rootRank)
        is_root = root == self._rank
        buffers = [staging.input(tensor) if is_root else staging.output(tensor) for tensor in tensors]
        launches = [lambda t, b, x=buffer: self._plane.broadcast(x, root, t, b) for buffer in buffers]
        return self._run(launches, opts, tensors, staging)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *, timeout: Any = None) -> dist.Work:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = calls.timed(_AllgatherOptions(), opts, timeout)
        return self._all_gather(list(zip(outputs, inputs, strict=True)), opts)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._all_gather_single([(output, tensor)], opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        return self._all_gather_single(list(zip(outputs, inputs, strict=True)), opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """``outputs`` is a list for each rank, not for each input."""
        return self._all_gather(list(zip(zip(*outputs, strict=True), inputs, strict=True)), opts)

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _all_gather(self, pairs: list[tuple[Tensors, torch.Tensor]], opts: Any) -> dist.Work:
        staging = Staging()
        launches = []
        for outputs, tensor in pairs:
            calls.same_dtype([*outputs, tensor], "all_gather")
            buffers = [
                staging.output(out) for out in calls.one_a_rank(outputs, self._size, "all_gather", "outputs")
            ]
            source = staging.input(tensor)
            launches.append(lambda t, b, x=buffers, y=source: self._plane.all_gather(x, y, t, b))
        return self._run(launches, opts, [t for outputs, _ in pairs for t in outputs], staging)

    def _all_gather_single(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], opts: Any) -> dist.Work:
        staging = Staging()
        launches = []
        for output, tensor in pairs:
            calls.same_dtype([output, tensor], "all_gather_into_tensor")
            blocks = calls.split(staging.output(output), self._size, tensor, "all_gather_into_tensor")
            source = staging.input(tensor)
            launches.append(lambda t, b, x=blocks, y=source: self._plane.all_gather(x, y, t, b))
        return self._run(launches, opts, [output for output, _ in pairs], staging)

    def gather(
        self, outputs: Any, inputs: Any, root: Any = None, timeout: Any = None, *, opts: Any = None
    ) -> dist.Work:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = calls.rooted(dist.GatherOptions(), root, opts, None, timeout)
        root = int(opts.rootRank)
        tensor = calls.single(inputs, "gather")
        staging = Staging()
        targets = calls.one_a_rank(outputs[0], self._size, "gather", "outputs") if self._rank == root else []
        calls.same_dtype([*targets, tensor], "gather")
        buffers = [staging.output(output) for output in targets]
        source = staging.input(tensor)
        return self._run(
            [lambda t, b: self._plane.gather(buffers, source, root, t, b)], opts, targets, staging
        )

    def scatter(
        self, outputs: Any, inputs: Any, root: Any = None, timeout: Any = None, *, opts: Any = None
    ) -> dist.Work:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = calls.rooted(dist.ScatterOptions(), root, opts, None, timeout)
        root = int(opts.rootRank)
        output = calls.single(outputs, "scatter")
        staging = Staging()
        sources = calls.one_a_rank(inputs[0], self._size, "scatter", "inputs") if self._rank == root else []
        calls.same_dtype([*sources, output], "scatter")
        blocks = [staging.input(source) for source in sources]
        into = staging.output(output)
        return self._run([lambda t, b: self._plane.scatter(into, blocks, root, t, b)], opts, outputs, staging)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        calls.same_dtype([*outputs, *inputs], "all_to_all")
        staging = Staging()
        into = [staging.output(out) for out in calls.one_a_rank(outputs, self._size, "all_to_all", "outputs")]
        blocks = [
            staging.input(block) for block in calls.one_a_rank(inputs, self._size, "all_to_all", "inputs")
        ]
        return self._run([lambda t, b: self._plane.all_to_all(into, blocks, t, b)], opts, outputs, staging)

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        *,
        timeout: Any = None,
    ) -> dist.Work:
        opts = calls.timed(dist.AllToAllOptions(), opts, timeout)
        calls.same_dtype([output, tensor], "all_to_all_single")
        staging = Staging()
        into = calls.split_rows(staging.output(output), self._size, output_splits, "output")
        blocks = calls.split_rows(staging.input(tensor), self._size, input_splits, "input")
        return self._run([lambda t, b: self._plane.all_to_all(into, blocks, t, b)], opts, [output], staging)

    all_to_all_single = alltoall_base

    # --- synchronisation and messages

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        if opts is None or not getattr(opts, "asyncOp", True):
            given = timeout if opts is None else opts.timeout
            self._calls += 1
            self._plane.barrier(seconds(given, self._timeout_s), True)
            return _DONE
        return self._run([self._plane.barrier], opts, [], Staging())

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names every rank that did not come. ``wait_all_ranks`` is always so here."""
        self._calls += 1
        self._plane.barrier(seconds(timeout, self._timeout_s), True)

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist.Work:
        tensor = calls.single(tensors, "send")
        calls.check_message(to, self._size, tag, "send")
        staging = Staging()
        transfer = self._plane.send(staging.input(tensor), to, tag, self._timeout_s)
        return self._keep(TransferWork(self._plane, transfer, tensors, staging.kept))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        calls.check_message(source, self._size, tag, "recv")
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._receive(tensors, -1, tag)

    def _receive(self, tensors: Tensors, source: int, tag: int) -> dist.Work:
        tensor = calls.single(tensors, "recv")
        staging = Staging()
        transfer = self._plane.receive(staging.output(tensor), source, tag, self._timeout_s)
        return self._keep(TransferWork(self._plane, transfer, tensors, staging.kept, staging.finish))

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalescing = self._coalescing or [], None
        tickets = [ticket for work in works for ticket in work._tickets]
        if not tickets:
            return _DONE

        def finish() -> None:
            for work in works:
                work.wait()

        return self._keep(PendingWork(tickets, [], works, finish))

    # --- the end

    def shutdown(self) -> None:
        """Ends this rank's part. Operations in progress fail, here and on ranks that wait for this one."""
        if not self._closed:
            self._closed = True
            self._plane.close()
            self._pending.clear()

    def abort(self) -> None:
        self.shutdown()

    # --- common to all

    def _run(self, launches: Sequence[Launch], opts: Any, tensors: Tensors, staging: Staging) -> dist.Work:
        timeout_s = seconds(None if opts is None else opts.timeout, self._timeout_s)
        block = opts is not None and not getattr(opts, "asyncOp", True) and self._coalescing is None
        self._calls += 1
        with span("aggregation.collective", tensors=len(tensors), waits=block):
            tickets = [ticket for launch in launches if (ticket := launch(timeout_s, block)) is not None]
        finish = staging.finish
        if not tickets:
            if finish is not None:
                finish()
            return DoneWork(tensors)
        return self._keep(PendingWork(tickets, tensors, staging.kept, finish))

    def _keep(self, work: PendingWork) -> PendingWork:
        """Holds the tensors of operations in progress, also if the caller drops the Work."""
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
    """What the plane reduces. A factor is multiplied in before, into a copy if the caller keeps its tensor."""
    if isinstance(op, Op):
        return as_native(buffer, op)
    if not (buffer.is_floating_point() or buffer.is_complex()):
        raise ArgumentError(f"PREMUL_SUM of {buffer.dtype} is not defined: it needs a floating-point dtype")
    if scale:
        with torch.no_grad():
            buffer = buffer.mul_(op) if in_place else buffer.mul(op)
    return as_native(buffer, Op.SUM)
