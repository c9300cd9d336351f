# SPDX-License-Identifier: Apache-2.0
"""Runs with adapters: what is saved and exported, and that any plan resumes them."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hetjax.api.exporting import export_model, weight_reader
from hetjax.api.trained_sources import find_trained
from hetjax.checkpoint.reader import Checkpoint
from hetjax.errors import BadInput
from hetjax.export import main as export
from hetjax.models.finetuning import LoraConfig, TrainConfig, fine_tuned
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.hugging_face.written import write_model
from hetjax.models.model import abstract_params
from hetjax.models.named import load_named
from hetjax.plans.plan_files import write_plan
from hetjax.training.directory.rundir import CHECKPOINTS, CONFIG
from hetjax.training.run_model import (
    run_model,
    warn_of_missing_rank,
    warn_of_random_base,
)
from hetjax.training.session import run
from hetjax.training.settings.presets import Preset
from hetjax.training.settings.presets import preset as preset_named
from tests.models.test_quantised import brute_force
from tests.training.small import (
    MODEL,
    MODEL_CONFIG,
    ONE_REPLICA,
    TWO_REPLICAS,
    but,
    losses,
    small_preset,
)

pytestmark = pytest.mark.usefixtures("quick_compiling")

RANK, ALPHA = 2, 6.0
ONLY_HEAD = TrainConfig(only=r"head\.norm")


def preset_of(directory: Path, inner_size: int = 32, **changes: object) -> Preset:
    """Return a run of three steps with adapters, on weights that no seed gives."""
    sizes = replace(MODEL_CONFIG, inner_size=inner_size)
    folder = directory / "small"
    if not folder.exists():
        rng = np.random.default_rng(0)
        folder.mkdir(parents=True)
        write_model(
            folder,
            sizes,
            fields_of(sizes),
            lambda _, shape: rng.normal(0, 0.2, shape).astype(np.float32),
            "float32",
        )
    lora = LoraConfig(rank=RANK, alpha=ALPHA)
    given = {"model": str(folder), "init": str(folder), "steps": 3, "lora": lora}
    plan = replace(TWO_REPLICAS, model=str(folder))
    return but(small_preset(directory, plan), **(given | changes))


def write_weights(folder: Path, seed: int) -> None:
    """Write a small model with the weights of a seed."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_model(
        folder,
        MODEL_CONFIG,
        fields_of(MODEL_CONFIG),
        lambda _, shape: rng.normal(0, 0.2, shape).astype(np.float32),
        "float32",
    )


def trained(chosen: Preset) -> int:
    return run(chosen.config, chosen, run_model(chosen.config))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Preset:
    chosen = preset_of(tmp_path_factory.mktemp("lora"))
    assert trained(chosen) == 0
    return chosen


def test_adapters_and_their_optimizer_state_are_all_that_is_saved(done: Preset):
    saved = Checkpoint.open(done.config.run_dir / CHECKPOINTS)
    arrays = [entry for entry in saved.entries.values() if entry.shape]
    assert arrays and all("_lora_" in entry.name for entry in arrays)
    dims = {"q": 32, "k": 32, "v": 32, "out": 32, "gate": 48, "up": 48, "down": 48}
    expected = 2 * RANK * sum(dims.values())  # two blocks; each dim is in + out
    weights = [entry for entry in arrays if entry.name.startswith("params.")]
    assert sum(int(np.prod(entry.shape)) for entry in weights) == expected


def test_stopped_and_resumed_on_another_plan_the_curve_goes_on(
    done: Preset, tmp_path: Path
):
    first = preset_of(tmp_path, stop_after=1)
    assert trained(first) == 4
    other = tmp_path / "other.json"
    write_plan(other, replace(ONE_REPLICA, model=first.config.model, fingerprint=None))
    second = but(first, stop_after=None, plan=other)
    assert trained(second) == 0
    expected, found = losses(done.config.run_dir), losses(second.config.run_dir)
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lora": LoraConfig(rank=4, alpha=ALPHA)}, "lora.rank = 4"),
        ({"lora": LoraConfig(rank=RANK, frozen="nf4")}, "lora.frozen = 'nf4'"),
        ({"lora": LoraConfig(rank=RANK, targets="mlp")}, "lora.targets = 'mlp'"),
        (
            {"lora": LoraConfig(), "train": TrainConfig(only="head")},
            "train.only = 'head'",
        ),
        ({"init": None}, "init = None"),
    ],
)
def test_a_run_goes_on_with_the_adapters_that_it_began_with(
    done: Preset, change: dict[str, object], said: str
):
    with pytest.raises(BadInput, match=said) as refused:
        trained(but(done, **change))
    assert "allowed: the same" in str(refused.value)
    assert "fix: " in str(refused.value)


def test_adapters_are_exported_as_peft_has_them_and_merged_as_one_model(
    done: Preset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir = str(done.config.run_dir)
    alone, merged = tmp_path / "alone", tmp_path / "merged"
    assert export([run_dir, "--to", str(alone)]) == 0
    assert "adapters of step 3 in float32" in capsys.readouterr().out
    assert export([run_dir, "--to", str(merged), "--merged"]) == 0
    said = json.loads((alone / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["rank_pattern"]) == (RANK, ALPHA, {})
    factors = load_file(alone / "adapter_model.safetensors")
    base, whole = (
        load_file(folder / "model.safetensors")
        for folder in (Path(done.config.model), merged)
    )
    assert base.keys() == whole.keys()
    changed = 0
    for name, value in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in factors:
            np.testing.assert_array_equal(whole[name], value)
            continue
        a, b = (factors[f"{module}.lora_{x}.weight"] for x in "AB")
        assert np.abs(b).max() > 1e-4
        expected = value + ALPHA / RANK * (b @ a)
        np.testing.assert_allclose(whole[name], expected, rtol=0, atol=1e-6)
        changed += 1
    assert changed == 14
    assert said["target_modules"] == sorted(
        name.removesuffix(".weight") for name in base if "proj" in name
    )


@pytest.mark.nightly
def test_over_nf4_a_run_goes_on_on_another_plan_and_is_exported_as_it_was_rounded(
    tmp_path: Path,
):
    lora = LoraConfig(rank=RANK, alpha=ALPHA, frozen="nf4")
    wide = 128  # two quantisation blocks of 64, shared by two devices
    whole = preset_of(tmp_path / "whole", wide, lora=lora)
    assert trained(whole) == 0
    first = preset_of(tmp_path / "parts", wide, lora=lora, stop_after=1)
    assert trained(first) == 4
    other = tmp_path / "other.json"
    write_plan(other, replace(ONE_REPLICA, model=first.config.model, fingerprint=None))
    assert trained(but(first, stop_after=None, plan=other)) == 0
    expected, found = losses(whole.config.run_dir), losses(first.config.run_dir)
    assert len(expected) == 3
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-5)
    to, adapters, under = (tmp_path / name for name in ("merged", "adapters", "under"))
    run_dir = str(first.config.run_dir)
    assert export([run_dir, "--to", str(to), "--merged"]) == 0
    with pytest.warns(UserWarning, match="rounded to nf4.*--merged.*--base FOLDER"):
        assert export([run_dir, "--to", str(adapters)]) == 0
    base, merged = (
        load_file(Path(folder) / "model.safetensors")
        for folder in (first.config.model, to)
    )
    factors = load_file(adapters / "adapter_model.safetensors")
    said = json.loads((adapters / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == first.config.init
    name = "model.layers.1.mlp.down_proj.weight"
    a, b = (
        factors[f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight"]
        for x in "AB"
    )
    rounded = brute_force("nf4", base[name].T, 1).T  # our layout has inputs first
    assert np.abs(rounded - base[name]).max() > 0.01
    np.testing.assert_allclose(
        merged[name], rounded + ALPHA / RANK * (b @ a), rtol=0, atol=1e-5
    )
    table = "model.embed_tokens.weight"
    np.testing.assert_array_equal(merged[table], base[table])
    again = tmp_path / "again"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert export([run_dir, "--to", str(again), "--base", str(under)]) == 0
    held = load_file(under / "model.safetensors")
    np.testing.assert_allclose(held[name], rounded, rtol=0, atol=1e-6)
    said = json.loads((again / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(under)
    ours, theirs = FolderWeights(again), FolderWeights(to)
    for path, shape in (
        (f"{spec.path}.{name}", parameter.shape)
        for spec in load_named(str(to)).modules
        for name, parameter in abstract_params(spec).items()
    ):
        found, expected = ours(path, shape), theirs(path, shape)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=path)


def test_adapters_over_rounded_weights_say_to_what_they_belong(
    done: Preset, tmp_path: Path
):
    """This test trains nothing: `nightly` has a run over rounded weights."""
    run_dir = tmp_path / "run"
    shutil.copytree(done.config.run_dir, run_dir)
    words = [str(run_dir), "--to"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert export([*words, str(tmp_path / "whole")]) == 0
    told = json.loads((run_dir / CONFIG).read_text())
    told["config"]["lora"]["frozen"] = "nf4"
    (run_dir / CONFIG).write_text(json.dumps(told))
    with pytest.warns(UserWarning, match="rounded to nf4.*--merged.*--base FOLDER"):
        assert export([*words, str(tmp_path / "rounded")]) == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--merged", "--base", "other"], "--merged with --base"),
        (["--base", "out"], "which is also --to"),
        (["--base", "."], "--base ., which is not an empty folder"),
    ],
)
def test_a_base_that_cannot_be_written_is_refused(
    done: Preset,
    more: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "something").touch()
    assert export([str(done.config.run_dir), "--to", "out", *more]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_adapters_over_weights_that_no_folder_has_are_warned_of(tmp_path: Path):
    lora = LoraConfig(rank=RANK)
    config = replace(small_preset(tmp_path).config, init=None, lora=lora)
    with pytest.warns(UserWarning, match="--lora.rank 2 without --init.*--init FOLDER"):
        warn_of_random_base(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_random_base(replace(config, init="somewhere"))
        warn_of_random_base(replace(config, lora=LoraConfig()))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (LoraConfig(alpha=16.0), "--lora.alpha 16.0 without --lora.rank"),
        (
            LoraConfig(alpha=8.0, targets="mlp"),
            "--lora.alpha 8.0 and --lora.targets mlp without --lora.rank",
        ),
    ],
)
def test_settings_of_adapters_that_have_no_effect_are_warned_of(
    given: LoraConfig, said: str, tmp_path: Path
):
    config = replace(small_preset(tmp_path).config, lora=given)
    with pytest.warns(UserWarning, match=said):
        warn_of_missing_rank(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_missing_rank(replace(config, lora=replace(given, rank=4)))
        warn_of_missing_rank(replace(config, lora=LoraConfig()))


def test_a_run_with_adapters_over_random_weights_warns_before_it_looks_for_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    class Begun(Exception):
        pass

    def begun(*_: object) -> None:
        raise Begun

    monkeypatch.setattr("hetjax.training.start.choose_hardware", begun)
    with pytest.raises(Begun):
        trained(preset_of(tmp_path, init=None))
    assert "warning: --lora.rank 2 without --init" in capfd.readouterr().out


def test_settings_of_generation_are_kept_as_they_are_with_their_tokenizer(
    done: Preset, tmp_path: Path
):
    """With another tokenizer, all settings except token ids are kept."""
    run_dir, first = done.config.run_dir, Path(done.config.model)
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "x": [1]}
    ids = {"eos_token_id": [7, 9], "pad_token_id": 7, "bos_token_id": 3}
    file = first / "generation_config.json"
    file.write_text(json.dumps(settings | ids))

    def exported(name: str) -> dict[str, object]:
        to = tmp_path / name
        assert export([str(run_dir), "--to", str(to), "--merged"]) == 0
        return json.loads((to / "generation_config.json").read_text())

    try:
        own = exported("own")
        assert own.pop("eos_token_id") not in (7, 9)
        assert own == settings
        (first / "tokenizer.json").write_bytes(
            (run_dir / "tokenizer.json").read_bytes()
        )
        assert exported("same") == settings | ids
        file.write_text("[1]")
        words = [str(run_dir), "--to", str(tmp_path / "bad"), "--merged"]
        assert export(words) == 2
    finally:
        file.unlink()
        (first / "tokenizer.json").unlink(missing_ok=True)
    assert exported("none").keys() == {"eos_token_id"}


def test_a_part_alone_is_trained_and_the_whole_is_exported(tmp_path: Path):
    only = TrainConfig(only=r"block_001\.mlp|head\.norm")
    chosen = preset_of(tmp_path, lora=LoraConfig(), train=only, steps=2)
    assert trained(chosen) == 0
    to = tmp_path / "out"
    assert export([str(chosen.config.run_dir), "--to", str(to)]) == 0
    assert export([str(chosen.config.run_dir), "--to", str(to), "--merged"]) == 2
    before, after = (
        load_file(Path(folder) / "model.safetensors")
        for folder in (chosen.config.model, to)
    )
    changed = {n for n, value in before.items() if not np.array_equal(value, after[n])}
    assert changed == {
        "model.norm.weight",
        "model.layers.1.post_attention_layernorm.weight",
        *(f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }


def test_a_checkpoint_of_another_model_is_not_filled_up_from_the_folder(tmp_path: Path):
    """Such is the checkpoint of a run whose tied folder got its own head afterwards."""
    chosen = preset_of(tmp_path, lora=LoraConfig())
    named = {
        f"{spec.path}.{name}": None
        for spec in run_model(chosen.config).modules
        for name in abstract_params(spec)
    }
    del named["head.table"]
    entries = {f"params.{path}": None for path in named}
    saved: Any = SimpleNamespace(entries=entries, step=3)
    with pytest.raises(BadInput, match="a checkpoint without head.table"):
        weight_reader(chosen.config, saved)


def test_frozen_weights_of_a_run_from_scratch_are_drawn_again(tmp_path: Path):
    only = TrainConfig(only=r"head\.norm")
    chosen = preset_of(
        tmp_path, init=None, lora=LoraConfig(), train=only, steps=2, stop_after=1
    )
    assert trained(chosen) == 4
    assert trained(but(chosen, stop_after=None)) == 0
    unbroken = preset_of(
        tmp_path / "other", init=None, lora=LoraConfig(), train=only, steps=2
    )
    assert trained(unbroken) == 0
    assert losses(chosen.config.run_dir) == losses(unbroken.config.run_dir)


@pytest.mark.parametrize(
    ("train", "lora", "said"),
    [
        (TrainConfig(only="nowhere"), LoraConfig(), "block_000.mlp.down"),
        (TrainConfig(only="("), LoraConfig(), "regular expression"),
        (TrainConfig(), LoraConfig(rank=4, targets="head"), "block_000.attention.q"),
        (TrainConfig(), LoraConfig(targets="mlp"), "without --lora.rank"),
        (TrainConfig(), LoraConfig(frozen="nf4"), "without --lora.rank"),
        (TrainConfig(), LoraConfig(rank=4, frozen="fp4"), "int8, nf4"),  # type: ignore
        (TrainConfig(), LoraConfig(rank=-1), "lora.rank = -1"),
        (TrainConfig(), LoraConfig(rank=4, alpha=0.0), "lora.alpha = 0"),
        (TrainConfig(only="head"), LoraConfig(rank=4), "either"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    train: TrainConfig, lora: LoraConfig, said: str
):
    with pytest.raises(BadInput) as refused:
        fine_tuned(MODEL, train, lora)
    told = str(refused.value)
    assert said in told and "allowed: " in told and "fix: " in told


@pytest.mark.parametrize("changes", [{}, {"lora": LoraConfig(), "train": ONLY_HEAD}])
def test_other_weights_in_the_folder_of_frozen_ones_are_refused(
    changes: dict[str, Any], tmp_path: Path
):
    chosen = preset_of(tmp_path, **changes)
    assert trained(chosen) == 0
    run_dir, folder = chosen.config.run_dir, Path(str(chosen.config.init))
    export_model(run_dir, tmp_path / "before")
    write_weights(folder, seed=1)
    for again in (
        lambda: trained(but(chosen, steps=4)),
        lambda: export_model(run_dir, tmp_path / "after"),
        lambda: find_trained(run_dir),
    ):
        with pytest.raises(BadInput, match="differ from those that the run"):
            again()
    write_weights(folder, seed=0)
    assert trained(but(chosen, steps=4)) == 0


def test_a_run_that_saves_all_weights_needs_its_first_folder_no_more(tmp_path: Path):
    chosen = preset_of(tmp_path, lora=LoraConfig())
    assert trained(chosen) == 0
    run_dir, folder = chosen.config.run_dir, Path(str(chosen.config.init))
    export_model(run_dir, tmp_path / "before")
    with pytest.raises(BadInput, match="the directory of a run"):
        preset_named(str(run_dir))
    folder.rename(tmp_path / "moved")
    export_model(run_dir, tmp_path / "after")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("before", "after")
    )
    assert {*before} == {*after}
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_run_that_has_saved_ignores_other_initial_weights_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    chosen = preset_of(tmp_path, lora=LoraConfig(), init=None)
    assert trained(but(chosen, stop_after=2)) == 4
    assert "no effect" not in capsys.readouterr().out
    assert trained(but(chosen, init=chosen.config.model)) == 0
    assert "small has no effect" in capsys.readouterr().out
    settings = json.loads((chosen.config.run_dir / CONFIG).read_text())
    assert settings["config"]["init"] is None
    whole = preset_of(tmp_path / "whole", lora=LoraConfig(), init=None)
    assert trained(whole) == 0
    assert losses(chosen.config.run_dir) == losses(whole.config.run_dir)
