"""Jobs as users of each launcher write them: ``sml`` by its name alone, without an import of ours.

``.ci/run`` runs this file in an environment that has Ray and Lightning.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ranks import free_port, python

PATIENCE_S = 400
pytestmark = pytest.mark.timeout(PATIENCE_S + 60)

SLURM = """
import torch, torch.distributed as dist
dist.init_process_group("sml")
from torchrelay.parameters import Embedding
with Embedding(8, 2).table as table:
    pass
total = torch.ones(2)
dist.all_reduce(total)
print(dist.get_rank(), total.tolist())
dist.destroy_process_group()
"""

LIGHTNING = """
import torch, torch.distributed as dist
import lightning.pytorch as lightning
from lightning.pytorch.strategies import DDPStrategy

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Last(lightning.Callback):
    def on_train_end(self, trainer, module):
        weights = [torch.empty_like(module.layer.weight) for _ in range(2)]
        dist.all_gather(weights, module.layer.weight.detach())
        assert torch.equal(*weights)
        print(f"over {dist.get_backend()} {trainer.world_size}")

torch.manual_seed(0)
rows = torch.utils.data.TensorDataset(torch.randn(16, 4))
lightning.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="sml"), max_epochs=1,
    callbacks=[Last()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
).fit(Model(), torch.utils.data.DataLoader(rows, batch_size=4))
"""

TRAINER = """
import sys, torch, torch.distributed as dist
dist.init_process_group("sml")  # before the arguments, which know Gloo and NCCL only
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}

torch.manual_seed(0)
arguments = TrainingArguments(
    sys.argv[1], use_cpu=True, max_steps=3, save_strategy="no", report_to=[], disable_tqdm=True,
    ddp_find_unused_parameters=False,
)
trainer = Trainer(Model(), arguments, train_dataset=[{"x": torch.randn(4)} for _ in range(64)])
trainer.train()
weight = trainer.model.layer.weight.detach()
weights = [torch.empty_like(weight) for _ in range(2)]
dist.all_gather(weights, weight)
assert torch.equal(*weights)
print(f"over {dist.get_backend()} {arguments.world_size}")
dist.destroy_process_group()
"""

RAY = """
import sys, tempfile, torch, ray
from ray.train import Checkpoint, RunConfig, ScalingConfig, report
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

def loop(folder):
    import torch.distributed as dist
    from torchrelay import checkpoint
    from torchrelay.parameters import Embedding
    torch.manual_seed(0)
    embedding = Embedding(16, 4)
    rows = embedding.table.optimizer()
    model = prepare_model(torch.nn.Linear(4, 1), move_to_device=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        rows.zero_grad()
        model(embedding(torch.arange(4) + dist.get_rank())).square().mean().backward()
        optimizer.step()
        rows.step()
    path = f"{folder}/step-3"
    checkpoint.save({"model": model.module, "table": embedding.table}, path)
    embedding.close()
    report({"world": dist.get_world_size(), "backend": dist.get_backend()},
           checkpoint=Checkpoint.from_directory(path) if dist.get_rank() == 0 else None)

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
result = TorchTrainer(
    loop, train_loop_config=sys.argv[1], torch_config=TorchConfig(backend="sml"),
    scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=sys.argv[2]),
).fit()
from torchrelay.checkpoint import load, verify
with result.checkpoint.as_directory() as path:
    assert verify(path)
    weight = torch.zeros(1, 4)
    load({"weight": weight}, path, prefix="model.")
    assert weight.any()
print("over", result.metrics["backend"], result.metrics["world"])
ray.shutdown()
"""


def run(code: str, folder: Path, *arguments: str, torchrun: bool = True, **environ: str) -> str:
    """Run ``code`` as a script, on two ranks of torchrun or in one process; return its output."""
    script = folder / "job.py"
    script.write_text(code)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with python(*(launcher if torchrun else []), str(script), *arguments, **environ) as job:
        output, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, output
    return output


def test_slurm_starts_the_ranks(tmp_path: Path) -> None:
    """The variables of ``srun --ntasks 2``, and MASTER_ADDR and MASTER_PORT from the script."""
    script = tmp_path / "job.py"
    script.write_text(SLURM)
    common = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                python(str(script), SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **common)
            )
            for rank in range(2)
        ]
        printed = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    for number, output in enumerate(printed):
        assert f"{number} [2.0, 2.0]" in output, printed


def test_lightning_takes_the_name_of_the_backend(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs lightning")
    assert run(LIGHTNING, tmp_path).count("over sml 2") == 2


def test_hugging_face_trainer_takes_the_group_that_is_there(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert run(TRAINER, tmp_path, str(tmp_path / "out")).count("over sml 2") == 2


def test_ray_train_takes_the_name_of_the_backend(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="needs ray")
    checkpoints, storage = tmp_path / "checkpoints", tmp_path / "storage"
    environ = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(PATIENCE_S),
    }
    output = run(RAY, tmp_path, str(checkpoints), str(storage), torchrun=False, **environ)
    assert "over sml 2" in output
