"""Hugging Face accelerate over a group of ``sml``."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation  # noqa: F401 - registers the backend
from torchrelay.world import World

pytest.importorskip("accelerate")

ROWS = 12


@pytest.mark.processes(2)
@pytest.mark.filterwarnings("ignore")  # accelerate's own
def test_accelerate_trains_over_the_group_that_it_finds(world: World) -> None:
    """On CPUs accelerate makes groups of Gloo or MPI only, but it takes one that is there."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object

    with pytest.raises(ValueError, match="backend sml is not available, please use gloo"):
        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="sml")])
    assert not dist.is_initialized()
    AcceleratorState._reset_state(reset_partial_state=True)
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2 and dist.get_backend() == "sml"
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 1)
    rows = torch.utils.data.TensorDataset(torch.randn(ROWS, 2), torch.randn(ROWS, 1))
    model, optimizer, loader = accelerator.prepare(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        torch.utils.data.DataLoader(rows, batch_size=2),
    )
    for inputs, wanted in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) - wanted).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    weights = accelerator.gather(module.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert accelerator.gather(torch.tensor([world.rank])).tolist() == [0, 1]
    assert accelerator.reduce(torch.ones(2)).tolist() == [2, 2]
    assert gather_object([world.rank]) == [0, 1] and broadcast_object_list([world.rank]) == [0]
    accelerator.wait_for_everyone()
    accelerates_own_test_of_data_loops()


def accelerates_own_test_of_data_loops() -> None:
    """The whole script. It is made for GPUs, so accelerate has to treat CPUs as it treats them."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.test_utils.scripts import test_distributed_data_loop as script
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = (
        "true"  # DDP takes no device ids for modules on CPUs
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    script.NUM_WORKERS = 0
    if importlib.util.find_spec("torchdata") is None:
        script.test_stateful_dataloader = script.test_stateful_dataloader_save_state = lambda _: (
            None
        )
    assert dist.get_backend() == "sml"
    script.main()
    assert not dist.is_initialized()  # its last line ends the group
