"""Collectives and messages of one group, between the caller's tensors and a data plane.

Every collective has the same steps: arguments to plain buffers, one or more operations of the data
plane, a Work. A call that c10d marks as synchronous runs in the calling thread and raises at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchrelay._group import ANY_RANK, Collective, Compression, Kind, Op, code
from torchrelay._torch import dispatches_itself, is_host_memory
from torchrelay.aggregation import _calls as calls
from torchrelay.aggregation._dtypes import SUMMED
from torchrelay.aggregation._plane import Plane, Tensors
from torchrelay.aggregation._work import (
    DoneWork,
    PendingWork,
    PendingWorks,
    TransferWork,
    seconds,
)
from torchrelay.errors import MismatchError, UnsupportedError

__all__ = ["Collectives"]

_DONE = DoneWork()
_STRIDED = torch.strided


class Collectives:
    """The collectives of a group, on parsed arguments.

    ``opts`` is the options object that c10d has for the collective.

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
        self.pending = PendingWorks()

    # --- reductions

    def sum_now(
        self, output: torch.Tensor, source: torch.Tensor, given: timedelta | None = None
    ) -> dist.Work | None:
        """Write the sum of all ranks' ``source`` to ``output``, of its shape and dtype, or itself,
        by the shortest path, blocking; return None, with nothing done, if one is not plain.
        """
        if (  # is_host_memory, without a call
            type(output) is not torch.Tensor
            or output.dtype not in SUMMED
            or output.layout is not _STRIDED
            or not output.is_cpu
            or not output.is_contiguous()
            or output.is_neg()
            or not (source is output or (type(source) is torch.Tensor and is_host_memory(source)))
        ):
            return None
        if given is None or given.days < 0:
            timeout_s = self.timeout_s
        else:
            timeout_s = seconds(given, self.timeout_s)
        self.count += 1
        self.plane.all_reduce(output, source, Op.SUM, timeout_s)
        return _DONE

    def all_reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        op, factor = calls.reduction_of(opts)
        if any(tensor.layout is not torch.strided for tensor in tensors):
            self.count += 1
            self._sum_sparse(tensors, op, seconds(opts.timeout, self.timeout_s))
            return DoneWork(tensors)
        staging = _Staging()
        for tensor in tensors:
            calls.check_reduction(tensor.dtype, op)
            staging.add(Kind.all_reduce, (), [staging.inout(tensor, factor)], op)
        return self._run(staging, opts, tensors)

    def compressed_sum(
        self, tensor: torch.Tensor, compression: Compression, lost: torch.Tensor
    ) -> dist.Work:
        """Start to replace ``tensor``, dense float32 on the CPU, by its sum over all ranks,
        encoded between hosts. ``lost`` as for :class:`Collective`.
        """
        call = Collective(Kind.all_reduce, (), [tensor], compression=compression, lost=lost)
        self.count += 1
        ticket = self.plane.run([call], self.timeout_s, False)
        tickets = [] if ticket is None else [ticket]
        return self.pending.keep(PendingWork(tickets, [tensor, lost], None))

    def _sum_sparse(self, tensors: Tensors, op: Op, timeout_s: float) -> None:
        """Replace the tensors (COO, of any number of sparse and dense dimensions) by their sums
        over all ranks. Blocks: every rank gathers all indices and values, and adds them up.

        Ranks may hold different indices. The results are coalesced, and the same on all ranks.

        Raises:
            UnsupportedError: another layout than COO, or another op than SUM.
            MismatchError: the ranks' numbers of tensors, shapes or dtypes differ.
        """
        for tensor in tensors:
            if tensor.layout is not torch.sparse_coo or op is not Op.SUM:
                raise UnsupportedError(
                    f"sml: {op.name} of {tensor.layout} tensors is not supported; all_reduce takes "
                    "the SUM of torch.sparse_coo tensors, all else needs dense ones (e.g. "
                    "Embedding(sparse=False))"
                )
        with torch.no_grad():
            parts = [tensor.detach().cpu().coalesce() for tensor in tensors]
            counts = self._agree_on_sparse(parts, timeout_s)
            sums = [
                self._sum_of_parts(part, rows, timeout_s)
                for part, rows in zip(parts, counts, strict=True)
            ]
            for tensor, total in zip(tensors, sums, strict=True):
                tensor.copy_(total)

    def _agree_on_sparse(self, parts: Tensors, timeout_s: float) -> list[list[int]]:
        """Compare the ranks' sparse tensors; return each rank's number of values, of each."""
        facts = [len(parts)]
        for part in parts:
            facts += [code(part.dtype), part.sparse_dim(), part.dim(), *part.shape]
        mine = torch.tensor([*facts, *(part._nnz() for part in parts)], device="cpu")
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self._gather(rows, mine, timeout_s)
        theirs = [row.tolist() for row in rows]
        if any(row[: len(facts)] != facts for row in theirs):
            shown = [row[: len(facts)] for row in theirs]
            raise MismatchError(
                "all_reduce: the ranks' sparse tensors differ in shape, sparse dimensions, dtype "
                f"or number; of each rank: {shown}, as number, and for each tensor dtype, sparse "
                "dimensions, dimensions and shape"
            )
        return [list(row) for row in zip(*(row[len(facts) :] for row in theirs), strict=True)]

    def _sum_of_parts(
        self, part: torch.Tensor, counts: Sequence[int], timeout_s: float
    ) -> torch.Tensor:
        """Return the sum of all ranks' ``part``, which has ``counts[rank]`` values on each."""
        indices, values = part.indices().contiguous(), part.values().contiguous()
        all_indices = [indices.new_empty(indices.shape[0], count) for count in counts]
        all_values = [values.new_empty(count, *values.shape[1:]) for count in counts]
        self._gather(all_indices, indices, timeout_s)
        self._gather(all_values, values, timeout_s)
        return torch.sparse_coo_tensor(
            torch.cat(all_indices, 1),
            torch.cat(all_values),
            part.shape,
            device="cpu",
            check_invariants=False,
        ).coalesce()

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        op, factor = calls.reduction_of(opts)
        root = calls.root_of(opts, self.size, "reduce")
        tensor = calls.single(tensors, "reduce")
        staging = _Staging()
        stage = staging.inout if self.rank == root else staging.input
        calls.check_reduction(tensor.dtype, op)
        staging.add(Kind.reduce, (), [stage(tensor, factor)], op, root)
        return self._run(staging, opts, tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        op, factor = calls.reduction_of(opts)
        staging = _Staging()
        for output, blocks in zip(outputs, inputs, strict=True):
            calls.one_block_a_rank(blocks, self.size, output, "reduce_scatter")
            calls.check_reduction(output.dtype, op)
            sources = [staging.input(block, factor) for block in blocks]
            staging.add(Kind.reduce_scatter, sources, [staging.output(output)], op)
        return self._run(staging, opts, outputs)

    def reduce_scatter_tensors(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """Scatter the reductions of one tensor or several, each of all ranks' blocks."""
        outputs, inputs = calls.as_lists((outputs, inputs))
        blocks = [
            calls.split(tensor, self.size, output, "reduce_scatter_tensor")
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self.reduce_scatter(outputs, blocks, opts)

    # --- copies

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        root = calls.root_of(opts, self.size, "broadcast")
        staging = _Staging()
        stage = staging.input if root == self.rank else staging.output
        for tensor in tensors:
            staging.add(Kind.broadcast, (), [stage(tensor)], root=root)
        return self._run(staging, opts, tensors)

    def all_gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        staging = _Staging()
        for targets, tensor in zip(outputs, inputs, strict=True):
            calls.same_dtype([*targets, tensor], "all_gather")
            calls.check_one_per_rank(targets, self.size, "all_gather", "outputs")
            buffers = [staging.output(target) for target in targets]
            staging.add(Kind.all_gather, [staging.input(tensor)], buffers)
        return self._run(staging, opts, [t for targets in outputs for t in targets])

    def all_gather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any
    ) -> dist.Work:
        """Gather several inputs; ``outputs`` is a list for each rank, not for each input."""
        return self.all_gather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_tensors(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        """Gather one tensor or several, each of all ranks' blocks."""
        outputs, inputs = calls.as_lists((outputs, inputs))
        staging = _Staging()
        for output, tensor in zip(outputs, inputs, strict=True):
            calls.same_dtype([output, tensor], "all_gather_into_tensor")
            buffer = staging.output(output)
            blocks = calls.split(buffer, self.size, tensor, "all_gather_into_tensor")
            staging.add(Kind.all_gather, [staging.input(tensor)], blocks)
        return self._run(staging, opts, outputs)

    def _gather(self, blocks: Tensors, row: torch.Tensor, timeout_s: float) -> None:
        self.plane.run([Collective(Kind.all_gather, [row], blocks)], timeout_s, True)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        root = calls.root_of(opts, self.size, "gather")
        tensor = calls.single(inputs, "gather")
        targets = calls.on_root(outputs, self.rank == root, self.size, "gather", "outputs")
        calls.same_dtype([*targets, tensor], "gather")
        staging = _Staging()
        buffers = [staging.output(target) for target in targets]
        staging.add(Kind.gather, [staging.input(tensor)], buffers, root=root)
        return self._run(staging, opts, targets)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        root = calls.root_of(opts, self.size, "scatter")
        output = calls.single(outputs, "scatter")
        sources = calls.on_root(inputs, self.rank == root, self.size, "scatter", "inputs")
        calls.same_dtype([*sources, output], "scatter")
        staging = _Staging()
        blocks = [staging.input(source) for source in sources]
        staging.add(Kind.scatter, blocks, [staging.output(output)], root=root)
        return self._run(staging, opts, outputs)

    def all_to_all(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        calls.same_dtype([*outputs, *inputs], "all_to_all")
        calls.check_one_per_rank(outputs, self.size, "all_to_all", "outputs")
        calls.check_one_per_rank(inputs, self.size, "all_to_all", "inputs")
        staging = _Staging()
        targets = [staging.output(output) for output in outputs]
        staging.add(Kind.all_to_all, [staging.input(block) for block in inputs], targets)
        return self._run(staging, opts, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> dist.Work:
        calls.same_dtype([output, tensor], "all_to_all_single")
        staging = _Staging()
        into = calls.split_rows(staging.output(output), self.size, output_splits, "output")
        blocks = calls.split_rows(staging.input(tensor), self.size, input_splits, "input")
        staging.add(Kind.all_to_all, blocks, into)
        return self._run(staging, opts, [output])

    # --- synchronisation and messages

    def barrier(self, opts: Any) -> dist.Work:
        staging = _Staging()
        staging.add(Kind.barrier)
        return self._run(staging, opts, [])

    def send(self, tensors: Tensors, to: int, tag: int) -> dist.Work:
        calls.check_rank(to, self.size, "send")
        return self._transfer("send", tensors, to, tag)

    def receive(self, tensors: Tensors, source: int, tag: int) -> dist.Work:
        calls.check_rank(source, self.size, "recv")
        return self._transfer("recv", tensors, source, tag)

    def receive_from_any(self, tensors: Tensors, tag: int) -> dist.Work:
        return self._transfer("recv", tensors, ANY_RANK, tag)

    def _transfer(self, name: str, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        tensor = calls.single(tensors, name)
        calls.check_tag(tag, name)
        staging = _Staging()
        if name == "send":
            transfer = self.plane.send(staging.input(tensor), peer, tag, self.timeout_s)
        else:
            transfer = self.plane.receive(staging.output(tensor), peer, tag, self.timeout_s)
        if transfer is None:
            return staging.done(tensors, max(peer, 0))
        return self.pending.keep(TransferWork(self.plane, transfer, tensors, staging.finish))

    def close(self) -> None:
        self.plane.close()
        self.pending.clear()

    # --- common to all

    def _run(self, staging: _Staging, opts: Any, tensors: Tensors) -> dist.Work:
        timeout_s = seconds(opts.timeout, self.timeout_s)
        block = not getattr(opts, "asyncOp", True) and not self.pending.is_coalescing
        self.count += 1
        ticket = self.plane.run(staging.calls, timeout_s, block)
        if ticket is None:
            return staging.done(tensors)
        return self.pending.keep(PendingWork([ticket], tensors, staging.finish))


class _Staging:
    """The buffers of one call, contiguous and on the CPU, and the collectives that use them."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._buffers: list[torch.Tensor] = []  # which stay alive
        self.calls: list[Collective] = []

    def add(
        self,
        kind: Kind,
        inputs: Tensors = (),
        outputs: Tensors = (),
        op: Op = Op.SUM,
        root: int = -1,
    ) -> None:
        self.calls.append(Collective(kind, inputs, outputs, op, root))

    def input(self, tensor: torch.Tensor, factor: float | None = None) -> torch.Tensor:
        """Return a plain tensor with the values of ``tensor``, times ``factor``."""
        return self._buffer(tensor, is_input=True, is_output=False, factor=factor)

    def output(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor whose values ``finish`` copies to ``tensor``."""
        return self._buffer(tensor, is_input=False, is_output=True)

    def inout(self, tensor: torch.Tensor, factor: float | None = None) -> torch.Tensor:
        """Return a plain tensor that is input, times ``factor``, and output."""
        return self._buffer(tensor, is_input=True, is_output=True, factor=factor)

    def _buffer(
        self,
        tensor: torch.Tensor,
        *,
        is_input: bool,
        is_output: bool,
        factor: float | None = None,
    ) -> torch.Tensor:
        if dispatches_itself(tensor):
            raise UnsupportedError(
                f"sml: a {type(tensor).__name__} has no memory of its own to send; pass its local "
                "tensor"
            )
        if tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"sml: {tensor.layout} tensors are supported by all_reduce only; use dense ones "
                "(e.g. Embedding(sparse=False))"
            )
        if factor is None and is_host_memory(tensor):
            return tensor
        # Pinned for a CUDA tensor, so that copies run at the link's speed.
        buffer = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
        )
        if is_input:
            with torch.no_grad():
                buffer.copy_(tensor)  # from a GPU: waits for the current stream
                if factor is not None:  # the caller's tensor stays until all ranks agree
                    buffer.mul_(factor)
        self._buffers.append(buffer)
        if not is_input and tensor.is_cuda:  # what is queued may still write to it
            torch.cuda.current_stream(tensor.device).synchronize()
        if is_output:
            self._copies.append((tensor, buffer))
        return buffer

    def finish(self) -> None:
        """Copy results to the caller's tensors."""
        for tensor, buffer in self._copies:
            # Inference mode is each thread's own.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(buffer)  # to a GPU: waits, for users on any stream

    def done(self, tensors: Tensors, source: int = 0) -> dist.Work:
        """Return the Work of a call that has ended."""
        self.finish()
        return DoneWork(tensors, source)
