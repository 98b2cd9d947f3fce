"""Hugging Face accelerate over a group of ``sml``."""

from __future__ import annotations

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
    from accelerate.test_utils.scripts import test_distributed_data_loop as data_loop
    from accelerate.utils import broadcast_object_list, gather_object

    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2 and dist.get_backend() == "sml"
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 1)
    rows = torch.utils.data.TensorDataset(torch.randn(ROWS, 2), torch.randn(ROWS, 1))
    model, optimizer, loader = accelerator.prepare(
        module, torch.optim.SGD(module.parameters(), lr=0.1), torch.utils.data.DataLoader(rows, batch_size=2)
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
    data_loop.test_default_ensures_even_batch_sizes()
    data_loop.test_can_disable_even_batches()
    loader = torch.utils.data.DataLoader(
        data_loop.DummyDataset(), batch_size=data_loop.BATCH_SIZE, shuffle=True
    )
    data_loop.test_data_loader(loader, accelerator)
    accelerator.wait_for_everyone()
