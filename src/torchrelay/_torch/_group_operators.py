"""c10d's operators on groups made in Python.

torch's C++ code (functional collectives, reducer, hooks) calls methods of ProcessGroup. Only some
of them reach a group's Python methods; the others call an operator of c10d, whose kernels need a
backend in C++, which Python cannot make before torch 2.14. A kernel for the dispatch key
``BackendSelect``, where c10d has none, passes the operators of such groups to their methods, and
those of all other groups on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchrelay._torch._operators import operator_results

__all__ = ["route"]

_c10d: Any = torch._C._distributed_c10d
_functional: Any = dist.distributed_c10d
_ProcessGroup: Any = dist.ProcessGroup
# Methods whose name is not the operator's without its last "_".
_METHODS = {"recv_any_source_": "recv_anysource"}
# Arguments that say nothing to a group made in Python.
_IGNORED = {"root_tensor", "async_op", "sparse_indices", "device_ids", "wait_all_ranks"}


@functools.cache
def route(kind: Any) -> object:
    """Let C++ reach the methods of all groups of ``kind``, from now on."""
    new_library: Any = torch.library.Library
    library = new_library("c10d", "IMPL")
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        classes = [argument.type.annotation_str for argument in schema.arguments]
        if namespace == "c10d" and any(each.endswith("c10d.ProcessGroup") for each in classes):
            operator = getattr(torch.ops.c10d, name).default
            kernel = functools.partial(_call, kind, operator)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)
    if hasattr(torch.ops._c10d_functional, "batch_p2p_ops"):  # since torch 2.13
        more = new_library("_c10d_functional", "IMPL")
        kernel = functools.partial(_exchange, kind)
        more.impl("batch_p2p_ops", kernel, "BackendSelect", with_keyset=True)
        library._more = more
    return library


def _call(kind: type[Any], operator: Any, keys: Any, *arguments: Any) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("process_group")
    group = _ProcessGroup.unbox(arguments[place])
    if not isinstance(group, kind):
        return _pass_on(operator, keys, *arguments)
    name = operator._schema.name.partition("::")[2]
    tensors = () if name in ("barrier", "monitored_barrier_") else arguments[:place]
    rest = [
        _value(argument, value)
        for argument, value in zip(names[place + 1 :], arguments[place + 1 :], strict=False)
        if argument not in _IGNORED and not (argument == "timeout" and value < 0)
    ]
    method = getattr(group, _METHODS.get(name, name.removesuffix("_")))
    work = method(*tensors, *rest)
    return None if work is None else operator_results(operator, arguments, _held(work))


def _value(name: str, value: Any) -> Any:
    if name == "timeout":
        return timedelta(milliseconds=value)
    if name == "reduce_op":
        return dist.ReduceOp(dist.ReduceOp.RedOpType(value.op()))
    return value


def _exchange(
    kind: type[Any],
    keys: Any,
    operations: Sequence[str],
    peers: Sequence[int],
    tags: Sequence[int],
    tensors: Sequence[torch.Tensor],
    group_name: Any,
) -> Any:
    """Send and receive as ``batch_p2p_ops``; C++ would begin with a call of a C++ backend."""
    group = _functional._resolve_process_group(group_name)
    if not isinstance(group, kind):
        operator = torch.ops._c10d_functional.batch_p2p_ops.default
        return _pass_on(operator, keys, operations, peers, tags, tensors, group_name)
    results = []
    for operation, peer, tag, tensor in zip(operations, peers, tags, tensors, strict=True):
        if operation == "isend":
            result, work = tensor.new_empty(0), group.send([tensor], peer, tag)
        else:
            result, work = tensor, group.recv([tensor], peer, tag)
        _c10d._register_work(result, _held(work))
        results.append(result)
    return results


def _pass_on(operator: Any, keys: Any, *arguments: Any) -> Any:
    return operator.redispatch(keys.remove(torch._C.DispatchKey.BackendSelect), *arguments)


class _Holder(_ProcessGroup):  # type: ignore[misc]
    """A group whose barrier returns ``work``: C++ wraps what it gets from a method of a group in a
    Work that keeps the Python object alive.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.work: dist.Work | None = None

    def barrier(self, opts: Any) -> Any:
        return self.work


class _Holders(threading.local):
    def __init__(self) -> None:
        self.holder = _Holder()


_holders = _Holders()


def _held(work: dist.Work) -> dist.Work:
    """Return a Work for C++ to keep."""
    holder = _holders.holder
    holder.work = work
    try:
        held: dist.Work = _ProcessGroup.barrier(holder, _functional.BarrierOptions())
    finally:
        holder.work = None
    return held
