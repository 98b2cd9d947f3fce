"""The public API: its names, their docstrings, and what an import costs."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from typing import get_origin

import pytest

import torchrelay

# What others' packages call; ``.ci/run`` tests these where the packages are.
ADAPTERS = {
    "checkpoint.lightning": ["CheckpointIO"],
    "checkpoint.torch_checkpointing": ["VerifiedStorageConfig"],
}
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(torchrelay.__path__, "torchrelay.")
    if not any(part.startswith("_") for part in module.name.split("."))
    and module.name.removeprefix("torchrelay.") not in ADAPTERS
)
PUBLIC = {
    "aggregation": "CompressionState Configuration LinkStats Options PlaneStats SmlGroup"
    " all_reduce_ compression_hook get_reconfigure_handle reconfigure register stats",
    "aggregation.switch": "Controller DataPlane SessionShape SessionStats SessionWorkerStats"
    " SwitchClient SwitchServer SwitchStats SwitchWorkerStats"
    " UdpDataPlane Uplink XdpDataPlane",
    "checkpoint": "Checkpointer HuggingFace Keep LoadResult Reader SaveHandle Writer async_save"
    " latest load save verify",
    "deferred": "deferred_init dematerialize fake is_deferred materialize_module"
    " materialize_tensor",
    "deferred.fake": "FakeTensor fake_mode is_fake meta_like",
    "mpi": "COMM_WORLD MPI_ANY_SOURCE MPI_ANY_TAG MPI_BAND MPI_BOR MPI_BXOR MPI_LAND MPI_LOR"
    " MPI_LXOR MPI_MAX MPI_MAXLOC MPI_MIN MPI_MINLOC MPI_PROC_NULL MPI_PROD MPI_SUM MPI_UNDEFINED"
    " CartCommunicator Communicator JoinDummies JoinDummiesHandle Located Op WaitHandle backward"
    " chain from_mpi4py grad reset",
    "parameters": "Embedding EmbeddingBag IntentLoader KeyInit Metrics Table TableOptimizer"
    " TableWeight UpdateRule optim",
    "parameters.optim": "adagrad adam add rowwise_adagrad sgd",
    "switching": "Client GenerateOptions InputSpec ModelStore Region Reply SharedCache StoredModel"
    " Switcher Token TokenStream TrainingHandle TrainingTask",
    "training": "AnyPrecisionAdamW DiLoCo Elastic ElasticLoader GossipGraDState LocalSGD"
    " SlowMoState SlowMomentumOptimizer Step GossipTopology get_num_modules gossip_grad_hook"
    " slowmo_hook",
}


@pytest.mark.parametrize("name", MODULES)
def test_public_names_exist_and_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for public in module.__all__:
        thing = getattr(module, public)
        is_alias = get_origin(thing) is not None  # in Python 3.10 a class, too
        if not is_alias and (inspect.isclass(thing) or inspect.isfunction(thing)):
            assert thing.__doc__, f"{name}.{public} has no docstring"


@pytest.mark.parametrize("component", sorted(PUBLIC))
def test_components_export_what_they_promise_and_nothing_else(component: str) -> None:
    """A change of ``PUBLIC`` is a change that users see: it needs a line in the changelog."""
    module = importlib.import_module(f"torchrelay.{component}")
    assert sorted(module.__all__) == sorted(PUBLIC[component].split())
    if component == "aggregation":
        return  # its __init__ registers the backend, with names of its own modules
    own = {
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(thing) or inspect.isfunction(thing))
        and thing.__module__.startswith(module.__name__ + ".")
    }
    assert own <= set(module.__all__)


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_adapters_export_what_they_promise(adapter: str) -> None:
    pytest.importorskip(adapter.partition(".")[2], reason="needs the package of that name")
    assert importlib.import_module(f"torchrelay.{adapter}").__all__ == ADAPTERS[adapter]


def test_no_two_public_classes_have_one_name() -> None:
    """``compat`` has the originals' names."""
    found: dict[str, dict[int, str]] = {}
    for name in MODULES:
        if name.split(".")[1:2] != ["compat"]:
            module = importlib.import_module(name)
            for public in module.__all__:
                found.setdefault(public, {})[id(getattr(module, public))] = name
    shared = {public: [*things.values()] for public, things in found.items() if len(things) > 1}
    assert not {public: names for public, names in shared.items() if public[0].isupper()}


def test_only_components_and_the_foundation_have_public_modules() -> None:
    components = {*PUBLIC, "compat", "cli", "demo"}
    foundation = {"buffers", "config", "errors", "metrics", "transport", "world"}
    # A folder inside a component has no API of its own.
    apis = [name for name in MODULES if importlib.import_module(name).__all__]
    names = {name.removeprefix("torchrelay.") for name in apis}
    inside = {name for name in names if name.split(".")[0] in ("compat", "cli", "demo")}
    assert names - inside == (components | foundation) - {"compat", "cli", "demo"}


def _python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_importing_the_package_imports_nothing_heavy() -> None:
    loaded = _python(
        "import sys, torchrelay; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert loaded == "False False"


def test_importing_the_foundation_costs_little_beyond_torch_and_no_distributed() -> None:
    code = """
import sys, torch
torch_alone = set(sys.modules)
import torchrelay, torchrelay.buffers, torchrelay.world, torchrelay.config
added = sorted(name for name in set(sys.modules) - torch_alone if not name.startswith("torchrelay"))
print([name for name in added if name.startswith("torch.distributed")], len(added))
"""
    distributed, count = _python(code).rsplit(" ", 1)
    assert distributed == "[]"
    assert int(count) < 10
