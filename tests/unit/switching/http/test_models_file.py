"""What a models file may say, and the sentence for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay.errors import ArgumentError, ConfigError
from torchrelay.switching import GenerateOptions, InputSpec, ModelStore
from torchrelay.switching.http._models_file import ModelsFile
from torchrelay.switching.http._repository import Repository
from torchrelay.switching.worker._profile import Layer, Output, Profile, load_profile, save_profile

INPUT = 'inputs = [{ name = "x", datatype = "FP32", shape = [-1, 64] }]'
GENERATE = '[models.m]\nkind = "generate"\nweights = "folder"\n'
EMBED = GENERATE.replace("generate", "embed")
MODEL = f'[models.m]\nfactory = "folder/file.py:make"\n{INPUT}\n'


def read(folder: Path, text: str) -> ModelsFile:
    path = folder / "models.toml"
    path.write_text(text)
    return ModelsFile.read(path)


def test_a_file_is_read_with_paths_relative_to_it(tmp_path: Path) -> None:
    keys = 'weights = "w.safetensors"\npriority = 2\nmax_batch_size = 8\n'
    file = read(tmp_path, f"[server]\nlink_gbps = 6\n{MODEL}{keys}")
    entry = file.models["m"]
    assert entry.priority == 2 and entry.load
    assert entry.arguments == {
        "factory": f"{tmp_path.resolve()}/folder/file.py:make",
        "weights": tmp_path / "w.safetensors",
        "max_batch_size": 8,
        "inputs": {"x": InputSpec("x", torch.float32, (-1, 64))},
    }
    assert file.server.link_gbps == 6.0 and file.server.host == "127.0.0.1"


def test_an_input_may_have_an_example(tmp_path: Path) -> None:
    file = read(tmp_path, MODEL.replace("[-1, 64]", "[-1, 64], example = [16, 64]"))
    (spec,) = file.models["m"].arguments["inputs"].values()
    assert spec == InputSpec("x", torch.float32, (-1, 64), (16, 64))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no models"),
        ("[models", "cannot be read: "),
        (f"{MODEL}[other]\n", "unknown field `other`"),
        ("models = 1\n", "models: Expected `object`, got `int`"),
        ("[models]\nm = 1\n", r"\[models.m\] Expected `object`, got `int`"),
        ('[models.m]\nfactory = "a:b"\n', r"\[models.m\] inputs: name at least one"),
        (f"[models.m]\n{INPUT}\n", r"\[models.m\] factory: name the function that builds"),
        (f"{MODEL}kv_bytes = 1\n", r'kv_bytes: it is of models of kind = "generate"'),
        (f'{MODEL}kind = "generate"\n', "needs weights, the folder of a snapshot, or a factory"),
        ('[models.m]\nkind = "generate"\n', "needs weights, the folder of a snapshot, or a"),
        (f"{GENERATE}max_batch_size = 1000\n", r"\[models.m\]: max_batch_size=1000: it must be"),
        (f"{GENERATE}weight = 0.0\n", r"\[models.m\]: max_context=0, kv_bytes=0, weight=0.0"),
        ('[models.m]\nkind = "other"\n', "Invalid enum value 'other'"),
        (f"{MODEL}seed = 1.5\n", "seed: Expected `int`, got `float`"),
        (f"{MODEL}code = 1\n", "unknown field `code`"),
        (MODEL.replace("FP32", "FP31"), "datatype 'FP31' is not served"),
        (MODEL.replace("name =", "nam ="), r"inputs\[0\]: Object contains unknown field `nam`"),
        (MODEL.replace('name = "x", ', ""), r"inputs\[0\]: Object missing required field `name`"),
        (MODEL.replace("[-1, 64]", "[-2, 64]"), "each size must be an integer of at least 0, or"),
        (MODEL.replace("[-1, 64]", "[-1, 6.4]"), r"shape\[1\]: Expected `int`, got `float`"),
        (MODEL.replace("64] }", "64], example = [1] }"), r"\(1,\) does not fit the shape \(-1, 64"),
        (
            MODEL.replace("64] }", "64], example = 1 }"),
            r"example: Expected `array \| null`, got `int`",
        ),
        (MODEL.replace("inputs = [", "inputs = [" + INPUT[10:-1] + ", "), "'x' appears twice"),
        (MODEL.replace('"x"', '""'), "an input has an empty name"),
        (MODEL.replace(INPUT, "inputs = []"), "name at least one"),
        (f"{MODEL}max_batch_size = -1\n", "max_batch_size: Expected `int` >= 0"),
        (f"{MODEL}keep_s = -1\n", "keep_s: Expected `float` >= 0.0"),
        (f'{MODEL}load = "later"\n', "load: "),
        (f'{EMBED}factory = "f.py:make"', "an encoder needs weights, the folder of a snapshot"),
        *(
            (MODEL.replace("[models.m]", f'[models."{name}"]'), "not a valid name of a model")
            for name in ("", ".", "..", "a/b", "a b", "a\\u0000", "a\\nb", "%2e%2e")
        ),
        (f"[server]\nport = -1\n{MODEL}", "must be at least 0"),
        (f'[server]\nport = "80"\n{MODEL}', "must be of type int"),
        (f"[server]\nprot = 80\n{MODEL}", "the unknown key prot"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_a_folder_of_files_is_read_as_one(tmp_path: Path) -> None:
    """Each file's paths are relative to its own folder; all have one table [server]."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        text = MODEL.replace("models.m", f"models.{name}") + 'load = "request"\nkeep_s = 60\n'
        (tmp_path / name / "models.toml").write_text(text)
    (tmp_path / "server.toml").write_text("[server]\nport = 9000\n")
    file = ModelsFile.read(tmp_path)
    assert sorted(file.models) == ["first", "second"] and file.server.port == 9000
    entry = file.models["second"]
    assert entry.arguments["factory"] == f"{tmp_path.resolve()}/second/folder/file.py:make"
    assert (entry.load, entry.keep_s) == ("request", 60.0)
    (tmp_path / "first" / "more.toml").write_text(MODEL.replace("models.m", "models.second"))
    with pytest.raises(ConfigError, match=r"both have a model 'second'"):
        ModelsFile.read(tmp_path)
    (tmp_path / "first" / "more.toml").write_text("[server]\nport = 1\n")
    with pytest.raises(ConfigError, match=r"both have a table \[server\]; keep one"):
        ModelsFile.read(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no files \*\.toml"):
        ModelsFile.read(tmp_path / "empty")


def test_a_model_that_generates_has_limits_of_its_own(tmp_path: Path) -> None:
    keys = "max_context = 100\nmax_batch_size = 4\nweight = 2.0\nkeep_s = 60\npinned = true\n"
    entry = read(tmp_path, f"{GENERATE}{keys}").models["m"]
    assert entry.keep_s == 60.0 and entry.pinned
    assert entry.arguments == {
        "weights": tmp_path / "folder",
        "generate": GenerateOptions(max_context=100, max_batch_size=4, weight=2.0),
        "inputs": {"input_ids": InputSpec("input_ids", torch.int64, (-1, -1), (1, 8))},
    }


def test_an_encoder_is_its_snapshot(tmp_path: Path) -> None:
    text = '[models.m]\nkind = "embed"\nweights = "folder"\n'
    arguments = read(tmp_path, text).models["m"].arguments
    assert arguments.pop("inputs").keys() == {"input_ids", "attention_mask"}
    assert arguments == {"weights": tmp_path / "folder", "embed": True}


def test_snapshots_are_served_by_the_names_of_their_folders(tmp_path: Path) -> None:
    for name in ("qwen-0.5", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "qwen-0.5" / "config.json").write_text("{}")
    (entry,) = ModelsFile.of_snapshots(tmp_path).models.values()
    assert (entry.name, entry.load) == ("qwen-0.5", "request")
    assert entry.arguments["weights"] == tmp_path / "qwen-0.5"
    assert entry.arguments["generate"] == GenerateOptions()
    wrong: Any
    for wrong in ({"max_context": 1.5}, {"max_batch_size": "8"}, {"weight": float("inf")}):
        with pytest.raises(ArgumentError, match="must be"):
            GenerateOptions(**wrong)
    (tmp_path / "qwen-0.5" / "config.json").write_text('{"architectures": ["BertModel"]}')
    (entry,) = ModelsFile.of_snapshots(tmp_path).models.values()
    assert entry.arguments["embed"] is True
    with pytest.raises(ConfigError, match="has no snapshots"):
        ModelsFile.of_snapshots(tmp_path / "other")


@pytest.mark.parametrize(
    "config",
    ["", "5", "[" * 100_000, '{"__float__": []}']
    + [f'{{"architectures": {one}}}' for one in ("[null]", "5", '"BertModel"', "{}", "null")],
    ids=lambda config: config[:40],
)
def test_no_folder_keeps_others_from_being_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: str
) -> None:
    def add(*names: str) -> None:
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(config)

    add("no name")
    with pytest.raises(ConfigError, match=r"not a valid name of a model.*rename the folder"):
        ModelsFile.of_snapshots(tmp_path)
    add("first")
    caplog.clear()
    file = ModelsFile.of_snapshots(tmp_path)
    add("second", "a+b")
    assert looked_at_again(file, 3) == {"first", "second"}
    found = [one.getMessage() for one in caplog.records]
    assert len(found) == 2 and "'no name'" in found[0] and "'a+b'" in found[1]


def looked_at_again(file: ModelsFile, times: int) -> set[str]:
    switcher: Any = None
    with ModelStore() as store:
        repository = Repository(switcher, store, file.models, file.read_again)
        for _ in range(times):
            repository._looked_s = -1e9
            repository.is_on_request("unknown")
        return {*repository.entries}


def test_a_file_that_became_wrong_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = read(tmp_path, MODEL)
    (tmp_path / "models.toml").write_text("[")
    assert looked_at_again(file, 3) == {"m"}
    (found,) = caplog.records
    assert "no model was added" in found.getMessage()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        ModelsFile.read(tmp_path / "none.toml")


def test_profiles_are_kept_between_runs_and_damaged_ones_taken_anew(tmp_path: Path) -> None:
    outputs = (Output("output", "float32", 2),)
    profile = Profile((Layer((0, 2), 0.5), Layer((1,), 0.25)), 0.7, outputs)
    file = tmp_path / "cache" / "key.json"
    assert load_profile(file, 3) is None
    save_profile(file, profile)
    assert load_profile(file, 3) == profile
    assert load_profile(file, 2) is None and load_profile(file, 4) is None  # of another model
    save_profile(file, Profile())  # of a model that is not split
    assert load_profile(file, 3) == Profile()
    older = ('[{"module": 1}]', "[[1, 2]]", "[[[0], 1.0, 2]]", "[[[0], 1.0]]")  # without whole_s
    for damage in (
        "",
        "{}",
        *older,
        '{"layers": 1, "whole_s": 1}',
        '{"layers": [[[0], 1.0]]}',
        '{"layers": [[[0], 1.0, 2]], "whole_s": 1.0, "outputs": []}',
        '{"layers": [[[0], 1.0]], "whole_s": 1.0}',
        '{"layers": [[[0], 1.0]], "whole_s": 1.0, "outputs": [["output", "float32"]]}',
    ):
        file.write_text(damage)
        assert load_profile(file, 1) is None
    (tmp_path / "file").write_text("")
    save_profile(tmp_path / "file" / "key.json", profile)  # cannot be kept: no error
    save_profile(None, profile)
    assert load_profile(None, 3) is None
