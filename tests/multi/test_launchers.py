"""Jobs as users of each launcher write them: ``sml`` by its name alone, without an import of ours.

``.ci/run`` runs this file in an environment that has Ray and Lightning.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import preloaded
from namespaces import missing, switched
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

MPIRUN = """
import os, torch, torch.distributed as dist
from torchrelay import mpi

dist.init_process_group("sml")
rank = torch.tensor([float(dist.get_rank())])
mine = rank.clone()
dist.all_reduce(mine)
theirs = mpi.COMM_WORLD.Allreduce(rank, mpi.MPI_SUM)
links = [link.transport for link in dist.group.WORLD.stats().links]
host = os.environ["TORCHRELAY_HOST_ID"]
sums = f"{mine.item()} {theirs.item()}"
print(f"rank {dist.get_rank()} of host {host}: {sums}", *links[-1:], flush=True)
dist.destroy_process_group()
"""

LIGHTNING = """
import sys, torch, torch.distributed as dist
import lightning.pytorch as lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torchrelay.checkpoint import verify
from torchrelay.checkpoint.lightning import CheckpointIO

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

class Last(lightning.Callback):
    def on_train_end(self, trainer, module):
        weights = [torch.empty_like(module.layer.weight) for _ in range(2)]
        dist.all_gather(weights, module.layer.weight.detach())
        assert torch.equal(*weights)
        print(f"over {dist.get_backend()} {trainer.world_size}")

torch.manual_seed(0)
rows = torch.utils.data.TensorDataset(torch.randn(16, 4))

def fit(epochs, path=None):
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="sml"),
        max_epochs=epochs, callbacks=[Last(), ModelCheckpoint(sys.argv[1], save_last=True)],
        plugins=[CheckpointIO()], logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=4), ckpt_path=path)
    return trainer

last = fit(1).checkpoint_callback.last_model_path
assert verify(last)
resumed = fit(2, last)
assert resumed.global_step == 4 and resumed.optimizers[0].state_dict()["state"][0]["step"] == 4
"""

TRAINER = """
import dataclasses, json, sys, torch, torch.distributed as dist
dist.init_process_group("sml")  # before the arguments, which know Gloo and NCCL only
from transformers import Trainer, TrainerCallback, TrainingArguments
from torchrelay.checkpoint import HuggingFace, latest, load, save

class Checkpoints(TrainerCallback):
    def on_step_end(self, args, state, control, **objects):
        files = {"trainer_state.json": json.dumps(dataclasses.asdict(state))}
        path = f"{args.output_dir}/checkpoint-{state.global_step}"
        save(parts(**objects), path, keep=3, layout=HuggingFace(files=files))

    def on_train_begin(self, args, state, control, **objects):
        if state.global_step:
            load(parts(**objects), f"{args.output_dir}/checkpoint-{state.global_step}")

def parts(model, optimizer, lr_scheduler, **_):
    return {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}

def train(folder, steps):
    torch.manual_seed(0)
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=steps, save_strategy="no", report_to=[], disable_tqdm=True,
        ddp_find_unused_parameters=False, lr_scheduler_type="constant_with_warmup", warmup_steps=3,
    )
    rows = [{"x": torch.randn(4)} for _ in range(64)]
    trainer = Trainer(Model(), arguments, train_dataset=rows, callbacks=[Checkpoints()])
    trainer.train(resume_from_checkpoint=latest(folder, None))
    return trainer, arguments

straight, _ = train(sys.argv[1] + "/straight", 3)
train(sys.argv[1] + "/resumed", 2)
trainer, arguments = train(sys.argv[1] + "/resumed", 3)
assert torch.equal(trainer.model.layer.weight, straight.model.layer.weight)
weight = trainer.model.layer.weight.detach()
weights = [torch.empty_like(weight) for _ in range(2)]
dist.all_gather(weights, weight)
assert torch.equal(*weights)
print(f"over {dist.get_backend()} {arguments.world_size}")
dist.destroy_process_group()
"""

ACCELERATE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("sml")  # before Accelerator(), which knows Gloo, MPI and CCL only
from accelerate import Accelerator
from torchrelay.checkpoint import load, save

accelerator = Accelerator(cpu=True)
torch.manual_seed(accelerator.process_index)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
values = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
rows = torch.utils.data.TensorDataset(values)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, torch.utils.data.DataLoader(rows, batch_size=4)
)
steps = 0
for (batch,) in loader:
    optimizer.zero_grad()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    steps += 1
bare = accelerator.unwrap_model(model)
state = {"model": bare, "optimizer": optimizer, "step": steps}
save(state, f"{sys.argv[1]}/step-{steps}")
before = bare.weight.detach().clone()
with torch.no_grad():
    bare.weight.zero_()
optimizer.state_dict()["state"][0]["exp_avg"].zero_()
load(state, sys.argv[1])
assert torch.equal(bare.weight, before) and optimizer.state_dict()["state"][0]["exp_avg"].any()
weight = bare.weight.detach()
weights = accelerator.gather(weight)
assert torch.equal(*weights) and steps == 2
print(f"over {dist.get_backend()} {accelerator.num_processes}")
dist.destroy_process_group()
"""

ELASTIC = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("sml")
from torchrelay.parameters import Embedding

rank, size = dist.get_rank(), dist.get_world_size()
embedding = Embedding(8, 2, apply_gradients="backward")
print(f"{size} hosts", flush=True)
if size < 3:  # torchrun ends this attempt when another agent comes
    time.sleep(600)
total = torch.ones(2)
dist.all_reduce(total)
embedding(torch.arange(4)).sum().backward()
embedding.close()
print(f"rank {rank} summed {total.tolist()} in run {os.environ['TORCHELASTIC_RUN_ID']}", flush=True)
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


def test_srun_with_pmix_starts_mpi(tmp_path: Path) -> None:
    """What ``srun --mpi=pmix`` gives a rank: PMIx, here from Open MPI's runtime, and Slurm's
    variables; nothing of mpirun's.
    """
    launcher = shutil.which("prterun", path=str(Path(sys.executable).parent))
    if launcher is None:
        pytest.skip("needs Open MPI")
    script = tmp_path / "job.py"
    script.write_text(MPIRUN + "print(__import__('sys').modules['mpi4py.MPI'].COMM_WORLD.size)")
    step = "SLURM_PROCID=$PMIX_RANK SLURM_LOCALID=$PMIX_RANK SLURM_STEP_ID=0 SLURM_NTASKS=2"
    options = ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "-n", "2"]
    result = subprocess.run(
        [launcher, *options, "sh", "-c", f'{step} exec "$0" "$1"', preloaded.python(), str(script)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
            "TORCHRELAY_HOST_ID": "first",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        },
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    printed = result.stdout + result.stderr
    assert result.returncode == 0, printed
    for rank in range(2):
        assert f"rank {rank} of host first: 1.0 1.0" in printed, printed
    assert re.findall(r"^\d+$", printed, re.MULTILINE) == ["2", "2"], printed


def test_torchrun_adds_the_hosts_that_come_later(tmp_path: Path) -> None:
    """``--nnodes 1:3``: each agent that joins starts all ranks again, with one more host."""
    script = tmp_path / "job.py"
    script.write_text(ELASTIC)
    where = [
        "--nnodes=1:3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=job-7", "--local-addr=127.0.0.1", "--monitor-interval=0.1",
    ]  # fmt: skip
    printed = ""
    with contextlib.ExitStack() as stack:

        def agent(number: int) -> subprocess.Popen[str]:
            # Patience where agents and ranks share few cores; only the first has the store.
            conf = f"--rdzv-conf=is_host={int(number == 0)},last_call_timeout=2,join_timeout=300"
            command = ["-m", "torch.distributed.run", *where, conf, str(script)]
            environ = {
                "TORCHRELAY_HOST_ID": str(number),
                # Without it, an agent that joins later waits for an address that torch stores once.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            }
            return stack.enter_context(python(*command, **environ))

        agents = [agent(0)]
        assert agents[0].stdout is not None
        for line in agents[0].stdout:
            printed += line
            found = re.match(r"(\d) hosts", line)
            if found and int(found[1]) < 3 and len(agents) <= int(found[1]):
                agents.append(agent(len(agents)))
        outputs = [printed, *(one.communicate(timeout=PATIENCE_S)[0] for one in agents[1:])]
    assert [one.wait(timeout=PATIENCE_S) for one in agents] == [0, 0, 0], outputs
    ranks = re.findall(r"rank (\d) summed \[3.0, 3.0\] in run job-7", "".join(outputs))
    assert sorted(ranks) == ["0", "1", "2"], outputs
    assert "1 hosts" in printed and "3 hosts" in printed


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_mpirun_starts_the_ranks_of_several_hosts(tmp_path: Path) -> None:
    """Two network namespaces are the hosts; in the place of ssh is a script that enters them.

    The second host also has a name and a /dev/shm of its own, where Open MPI shares memory.
    """
    launcher = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if launcher is None:
        pytest.skip("needs Open MPI")
    script, remote, hosts_file = tmp_path / "job.py", tmp_path / "remote", tmp_path / "hosts"
    script.write_text(MPIRUN)
    with switched(2) as hosts:
        first, second = hosts.addresses
        entered = "\n".join(
            f"{address}) namespace=/proc/{pid}/ns/net ;;"
            for address, pid in zip(hosts.addresses, hosts.pids, strict=True)
        )
        remote.write_text(
            f'#!/bin/sh\ncase $1 in\n{entered}\nesac\nexport TORCHRELAY_HOST_ID="$1"\nshift\n'
            'exec nsenter --net="$namespace" unshare --uts --mount '
            'sh -c "hostname second && mount -t tmpfs none /dev/shm && $*"\n'
        )
        remote.chmod(0o755)
        hosts_file.write_text(f"{first} slots=2\n{second} slots=2\n")
        inside = ["nsenter", f"--net=/proc/{hosts.pids[0]}/ns/net"]
        command = [
            *inside, launcher, "--prtemca", "plm_ssh_agent", str(remote), "-n", "4",
            "--hostfile", str(hosts_file), "-x", f"MASTER_ADDR={first}", "-x", "MASTER_PORT=29500",
            "-x", "PATH", sys.executable, str(script),
        ]  # fmt: skip
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "TMPDIR": str(tmp_path),
            "TORCHRELAY_HOST_ID": first,
        }
        result = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    printed = result.stdout + result.stderr
    assert result.returncode == 0, printed
    found = re.findall(r"rank (\d) of host \S+: (\S+) (\S+) (\w+)", result.stdout)
    assert sorted(found) == [(str(rank), "6.0", "6.0", "tcp") for rank in range(4)], printed


def test_lightning_takes_the_name_of_the_backend(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs lightning")
    assert run(LIGHTNING, tmp_path, str(tmp_path / "ckpt")).count("over sml 2") == 4


def test_lightning_trains_an_elastic_member(tmp_path: Path) -> None:
    """As the page prints it, in two processes that end together."""
    pytest.importorskip("lightning", reason="needs lightning")
    page = Path(__file__).parents[2].joinpath("docs/elastic.md").read_text()
    (code,) = re.findall(r"```python\n(import itertools\n.*?)```", page, re.DOTALL)
    begin = "import torch; data = torch.utils.data.TensorDataset(torch.randn(64, 8))\n"
    end = "print('ends with', *model.layer.weight.flatten().tolist(), trainer.global_step)\n"
    changes = {
        "version >= 20": "version >= 20 and self.elastic.group.size() == 2",
        "fit(Model()": "fit(model := Model()",
        "max_epochs=-1": "max_epochs=-1, logger=False, enable_checkpointing=False",
    }
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    script = tmp_path / "job.py"
    script.write_text(begin + code + end)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with contextlib.ExitStack() as stack:
        members = [
            stack.enter_context(
                python(
                    str(script),
                    TORCHRELAY_ELASTIC_ADDRESS=address,
                    TORCHRELAY_ELASTIC_PEERS=",".join(addresses),
                )
            )
            for address in addresses
        ]
        printed = [member.communicate(timeout=PATIENCE_S)[0] for member in members]
    ends = [re.findall(r"ends with (.+) \d+$", output, re.MULTILINE) for output in printed]
    assert len(ends[0]) == 1 and ends[0] == ends[1], printed


def test_hugging_face_trainer_takes_the_group_that_is_there(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert run(TRAINER, tmp_path, str(tmp_path / "out")).count("over sml 2") == 2


def test_accelerate_takes_the_group_that_is_there(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert run(ACCELERATE, tmp_path, str(tmp_path / "ckpt")).count("over sml 2") == 2


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
