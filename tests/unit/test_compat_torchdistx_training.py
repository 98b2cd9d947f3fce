"""torchdistX's optimizers and hooks under its own names, as scripts and transformers import them."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from torchrelay.compat import install
install("torchdistx")
from torchdistx.gossip_grad import GossipGraDState, Topology, get_num_modules, gossip_grad_hook
from torchdistx.optimizers import AnyPrecisionAdamW
from torchdistx.optimizers.anyprecision_optimizer import AnyPrecisionAdamW as same
from torchdistx.slowmo import slowmo_comm, slowmo_optimizer
import torchdistx.slowmo.slowmo_comm
assert same is AnyPrecisionAdamW
assert torchdistx.slowmo.slowmo_comm is slowmo_comm
slowmo_comm.SlowMoState, slowmo_comm.slowmo_hook, slowmo_optimizer.SlowMomentumOptimizer

import torch
param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
optimizer = AnyPrecisionAdamW([param], use_kahan_summation=True, momentum_dtype=torch.float32)
param.grad = torch.ones_like(param)
optimizer.step()
print(sorted(optimizer.state[param]))
"""


def test_a_script_that_imports_torchdistx() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['compensation', 'exp_avg', 'exp_avg_sq', 'step']"
