"""What a training process reports: log lines, spans, and Prometheus metrics of its components."""

from __future__ import annotations

import logging
import multiprocessing
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchrelay import _telemetry, metrics, mpi
from torchrelay.checkpoint import async_save, load, save
from torchrelay.deferred import deferred_init, materialize_module
from torchrelay.errors import StorageError, UnavailableError
from torchrelay.parameters import Table
from torchrelay.switching import ModelStore, Switcher


def _values(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_a_training_process_serves_what_its_components_do(tmp_path: Path) -> None:
    dist.init_process_group("sml", store=dist.HashStore(), rank=0, world_size=1)
    with Table.create(8, 2, name="words") as table, metrics.serve(0) as endpoint:
        before = _values(_get(endpoint.port))
        dist.all_reduce(torch.ones(8))
        table.pull(torch.arange(3))
        save({"x": torch.ones(256)}, tmp_path / "step-1")
        after = _values(_get(endpoint.port))
        write = tmp_path / "torchrelay.prom"
        metrics.write_textfile(write)
        assert set(_values(write.read_text())) == set(after)
    dist.destroy_process_group()

    def difference(name: str, **labels: str) -> float:
        def total(samples: dict[str, list[tuple[dict[str, str], float]]]) -> float:
            return sum(
                value for has, value in samples.get(name, []) if labels.items() <= has.items()
            )

        return total(after) - total(before)

    assert difference("torchrelay_aggregation_collectives_total", rank="0") == 1
    assert difference("torchrelay_aggregation_payload_bytes_total") == 32
    assert difference("torchrelay_parameters_local_pulls_total", node="0") == 3
    assert difference("torchrelay_checkpoint_save_seconds_count") == 1
    assert difference("torchrelay_checkpoint_save_bytes_total") == 1024


def _get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def test_a_port_that_is_taken_is_named() -> None:
    with (
        metrics.serve(0) as first,
        pytest.raises(UnavailableError, match=rf"127.0.0.1:{first.port}: .*LOCAL_RANK"),
    ):
        metrics.serve(first.port)


def test_the_rank_is_that_of_the_process_group_without_a_launcher(tmp_path: Path) -> None:
    with metrics.serve(0) as endpoint:
        dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
        try:
            save({"x": torch.ones(1)}, tmp_path / "step-1", no_dist=True)
            samples = _values(_get(endpoint.port))["torchrelay_checkpoint_save_bytes_total"]
        finally:
            dist.destroy_process_group()
    assert [labels for labels, _ in samples] == [{"rank": "2"}]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_hold_the_port() -> None:
    fork = multiprocessing.get_context("fork")
    has_started, may_end = fork.Event(), fork.Event()

    def work() -> None:
        has_started.set()
        endpoint.close()
        may_end.wait()

    with metrics.serve(0) as endpoint:
        child = fork.Process(target=work, daemon=True)
        child.start()
    try:
        assert has_started.wait(60)
        metrics.serve(endpoint.port).close()
        may_end.set()
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()


def test_statistics_of_equal_labels_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    one = _telemetry.MetricSample("part_things", "Things", "counter", 2.0, {"kind": "a"})
    monkeypatch.setattr(_telemetry, "_sources", [])
    _telemetry.publish(lambda: [one, one._replace(value=3.0)])
    _telemetry.publish(lambda: [one._replace(labels={"kind": "b"})])
    assert [(s.value, s.labels) for s in _telemetry.samples()] == [
        (5.0, {"kind": "a"}),
        (2.0, {"kind": "b"}),
    ]


def test_long_events_are_one_line_each_and_quiet_by_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert logging.getLogger("torchrelay").handlers == []
    assert not logging.getLogger("torchrelay.checkpoint").isEnabledFor(logging.INFO)
    with caplog.at_level(logging.INFO, logger="torchrelay"):
        module = deferred_init(torch.nn.Linear, 4, 2)
        materialize_module(module)
        async_save({"x": torch.ones(256)}, tmp_path / "step-1").result()
        load({"x": torch.zeros(256)}, tmp_path / "step-1")
    lines = [(record.name, record.getMessage()) for record in caplog.records]
    assert [name for name, _ in lines] == ["torchrelay.deferred", *["torchrelay.checkpoint"] * 3]
    assert lines[0][1].startswith("materialize_module of Linear: ")
    assert lines[1][1].startswith(f"async_save of {tmp_path}/step-1: ")
    assert lines[1][1].endswith("s, 1,024 bytes")
    assert lines[2][1] == f"{tmp_path}/step-1 is committed"
    assert lines[3][1].startswith(f"load of {tmp_path}/step-1: ")


def test_an_event_that_fails_is_not_counted() -> None:
    before = _telemetry.counts().get(("checkpoint", "load"))
    with pytest.raises(StorageError):
        load({"x": torch.zeros(1)}, "/nowhere/at/all")
    assert _telemetry.counts().get(("checkpoint", "load")) == before


@pytest.mark.parametrize("is_sharded", [False, True])
def test_progress_of_a_materialization_counts_all_bytes_once(is_sharded: bool) -> None:
    def build() -> torch.nn.Module:
        module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(4, 8))
        module[1].weight = module[0].weight
        return module

    seen: list[tuple[int, int]] = []
    shard = (lambda name, _: (slice(0, 2),)) if is_sharded else None
    materialize_module(
        deferred_init(build), shard=shard, progress=lambda done, whole: seen.append((done, whole))
    )
    assert [whole for _, whole in seen] == [192] * len(seen)
    assert seen[-1][0] == 192 and [done for done, _ in seen] == sorted(done for done, _ in seen)


def _use_checkpoint(path: Path) -> None:
    save({"x": torch.ones(4)}, path / "step-1")
    load({"x": torch.zeros(4)}, path / "step-1")
    async_save({"x": torch.ones(4)}, path / "step-2").result()


def _use_deferred(_: Path) -> None:
    materialize_module(deferred_init(torch.nn.Linear, 4, 2))


def _use_mpi(_: Path) -> None:
    mpi.COMM_WORLD.Allreduce(torch.ones(2, requires_grad=True), mpi.MPI_SUM).sum().backward()


def _use_sml(_: Path) -> None:
    dist.init_process_group("sml", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(8))
    dist.destroy_process_group()


def _use_switching(_: Path) -> None:
    size, x = {"in_features": 4, "out_features": 2}, torch.ones(1, 4)
    with ModelStore() as store, Switcher(store, arena_bytes=1 << 20) as switcher:
        store.add("small", torch.nn.Linear, kwargs=size, inputs={"input": x})
        switcher.load("small")
        switcher.infer("small", {"input": x})


def _use_tables(_: Path) -> None:
    with Table.create(4, 2) as table:
        table.pull(torch.arange(2))
        table.push(torch.arange(2), torch.ones(2, 2))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("use", "spans"),
    [
        (_use_checkpoint, ["checkpoint.save", "checkpoint.load", "checkpoint.async_save"]),
        (_use_deferred, ["deferred.materialize_module"]),
        (_use_mpi, ["mpi.Allreduce"]),
        (_use_sml, ["sml:all_reduce"]),
        (_use_switching, ["switching.infer"]),
        (_use_tables, ["parameters.open", "parameters.pull", "parameters.push"]),
    ],
)
def test_torch_profiler_shows_each_component(
    use: Callable[[Path], None], spans: list[str], tmp_path: Path
) -> None:
    with torch.profiler.profile() as profile:
        use(tmp_path)
    names = {event.key.removeprefix("torchrelay.") for event in profile.key_averages()}
    assert set(spans) <= names
