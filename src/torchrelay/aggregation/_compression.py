"""Gradients compressed between hosts, with error feedback: a communication hook for DDP."""

# DDP compares the hook's annotations with types, so they are not postponed here.

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchrelay._group import Compression
from torchrelay.aggregation._group import core_of
from torchrelay.errors import ArgumentError, UnsupportedError

__all__ = ["CompressionState", "compression_hook"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class CompressionState:
    """State of :func:`compression_hook`: of each gradient, what compression on this rank has lost.

    Args:
        model: the module whose gradients are averaged, wrapped by DDP or not.
        compression: ``int8`` or ``bf16``; equal on all ranks.
        group: of ``sml``; default: the default group.

    Raises:
        ArgumentError: ``compression`` is another.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compression: str = "int8",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if compression not in ("int8", "bf16"):
            raise ArgumentError(
                f"CompressionState: compression is int8 or bf16, not {compression!r}"
            )
        if isinstance(model, DistributedDataParallel):
            model = model.module
        self.compression = compression
        self.group = group
        self._parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._lost: dict[str, torch.Tensor] = {}  # parts of those of the buckets
        self._buckets: dict[int, tuple[list[str], torch.Tensor]] = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what is lost of each parameter's gradient. Each rank has its own."""
        return {name: lost.view_as(self._parameters[name]) for name, lost in self._lost.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue with the state that the rank of the same number saved.

        Raises:
            ArgumentError: it has a parameter that the model lacks, or of another shape.
        """
        for name, lost in state.items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != lost.shape:
                raise ArgumentError(
                    f"CompressionState: the state has {name} of shape {tuple(lost.shape)}, and the "
                    f"model {'none' if parameter is None else tuple(parameter.shape)}; load what "
                    "was saved with this model"
                )
        self._lost = {name: lost.detach().float().flatten() for name, lost in state.items()}
        self._buckets = {}

    def lost_of(self, bucket: dist.GradBucket) -> torch.Tensor:
        """Return what is lost of a bucket's gradients, flat. DDP may reorder buckets."""
        parameters = bucket.parameters()
        try:
            names = [self._names[id(parameter)] for parameter in parameters]
        except KeyError:
            raise ArgumentError(
                "compression_hook: its CompressionState was made for another model; make it with "
                "the model that DDP wraps, after its parameters have been replaced"
            ) from None
        known, lost = self._buckets.get(bucket.index(), ([], torch.empty(0)))
        if names != known:
            sizes = [parameter.numel() for parameter in parameters]
            parts = [
                self._lost.get(name, torch.zeros(size))
                for name, size in zip(names, sizes, strict=True)
            ]
            lost = torch.cat(parts)
            self._buckets[bucket.index()] = names, lost
            self._lost.update(zip(names, torch.split(lost, sizes), strict=True))
        return lost


def compression_hook(
    state: CompressionState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients, compressed between hosts; a communication hook for DDP.

    What compression loses is added to the next gradient of the same parameter. Use it with
    ``ddp.register_comm_hook(CompressionState(model), compression_hook)`` on all ranks.

    Raises:
        UnsupportedError: the gradients are not float32, float16 or bfloat16.
        ArgumentError: the group is not of ``sml``, or ``state`` was made for another model.
        ConfigError: the group sums through a switch.
        MismatchError: the ranks' hooks or compressions differ.
    """
    buffer, group = bucket.buffer(), dist.group.WORLD if state.group is None else state.group
    if buffer.dtype not in _DTYPES:
        raise UnsupportedError(
            f"compression_hook: gradients of {buffer.dtype} cannot be compressed, only of float32, "
            "float16 and bfloat16; use DDP without this hook"
        )
    core = core_of(group)
    if core is None or core.host is None:
        raise ArgumentError(f"compression_hook: it needs a group of sml for the CPU, not {group!r}")
    values = buffer.to("cpu", torch.float32)  # buffer itself, where it can be
    lost = state.lost_of(bucket)
    values.div_(core.size()).add_(lost)
    lost.zero_()
    work = core.host.compressed_sum(values, Compression[state.compression], lost)

    def finish(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        done.value()  # raises what the sum does
        return buffer if values is buffer else buffer.copy_(values)

    return work.get_future().then(finish)
