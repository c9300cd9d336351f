# SPDX-License-Identifier: Apache-2.0
"""Options of other programs: accepted if they mean the same; otherwise advice."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from hetjax.cli.options import aliases
from hetjax.cli.options.invalid import options_of
from hetjax.cli.plan import PlanOptions
from hetjax.cli.train import parse
from hetjax.errors import BadInput
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import preset
from hetjax.training.settings.values import FORMER_NAMES

TINY = preset("tiny").config
# as in the documentation of transformers, torchtitan, axolotl and nanoGPT
ACCEPTED = {
    "--learning_rate 2e-5": "--optimizer.learning-rate 2e-5",
    "--lr=2e-5": "--optimizer.learning-rate=2e-5",
    "--optimizer.lr 8e-4": "--optimizer.learning-rate 8e-4",
    "--max_steps 1000 --seed 1": "--steps 1000 --seed 1",
    "--training.steps 10": "--steps 10",
    "--max_iters=10": "--steps=10",
    "--output_dir out": "--run-dir out",
    "--job.dump_folder out": "--run-dir out",
    "--bf16": "--dtype bfloat16",
    "--bf16 True --max_grad_norm 1": "--dtype bfloat16 --optimizer.clip-norm 1",
    "--fp16=true": "--dtype float16",
    "--use_cpu --lr 1": "--platform cpu --optimizer.learning-rate 1",
    "--weight_decay 0 --adam_beta2 0.9": "--optimizer.weight-decay 0 "
    "--optimizer.beta2 0.9",
    "--training.seq_len 128": "--seq-len 128",
    "--training.dataset_path a.txt": "--data.path a.txt",
    "--block_size 128": "--seq-len 128",
    "--training.global_batch_size 8": "--global-batch 8",
    "--save_steps 5 --eval_steps 7": "--checkpoint.every 5 --evaluation.every 7",
    "--train_file a.txt --validation_file b.txt": "--data.path a.txt "
    "--data.validation b.txt",
    "--sample_packing": "--data.pack True",
    "--packing False --bf16": "--data.pack False --dtype bfloat16",
    "--lora_r 8 --lora_alpha 16": "--lora.rank 8 --lora.alpha 16",
}
REFUSED = [
    *("--batch-size 8", "--per_device_train_batch_size 8", "--num_train_epochs 3"),
    *("--epochs 3", "--wandb", "--report_to wandb", "--gradient_accumulation_steps=4"),
    *("--deepspeed ds.json", "--model_name_or_path gpt2", "--warmup_ratio 0.1"),
    *(
        "--bf16 false",
        "--use_cpu no",
        "--lr_scheduler_type cosine",
        "--resume_from_checkpoint True",
    ),
    *("--val_set_size 0.1", "--adapter qlora", "--model.flavor 8B"),
    *("--dataset_name c4", "--load_in_4bit", "--nproc_per_node 8", "--torch-compile"),
]


def config(words: str) -> RunConfig:
    return parse(["tiny", *words.split()])[0]


@pytest.mark.parametrize("words", ACCEPTED)
def test_what_means_the_same_is_accepted(words: str):
    assert config(words) == config(ACCEPTED[words]) != TINY


@pytest.mark.parametrize("words", REFUSED)
def test_for_what_means_something_else_the_error_says_what_to_type(words: str):
    with pytest.raises(BadInput) as refused:
        config(words)
    typed = words.partition(" ")[0].partition("=")[0]
    assert typed in refused.value.got and refused.value.fix
    assert refused.value.got.endswith("an option of other programs")


def test_every_advice_can_be_typed():
    """Only existing options, with values that they take."""
    values = {"N": "8", "FILE": "a", "FOLDER": "b", "NAMES": "attention"}
    for why, fix in (*aliases._UNLIKE.values(), *aliases._NOT_OFF.values()):
        typed: list[tuple[str, str]] = re.findall(r"(--[\w.-]+) ([\w.-]+)", fix)
        assert why and (typed or fix == "leave it out" or fix.startswith("hetjax "))
        words = [word for name, value in typed for word in (name, value)]
        parse(["tiny", *(values.get(word) or word for word in words)])


def test_no_name_is_ours_or_has_two_meanings():
    options = {option.name for option in options_of(TINY)}
    theirs = [*aliases._OURS, *aliases._FLAGS, *aliases._UNLIKE]
    assert len(theirs) == len(set(theirs))
    assert len(aliases._OURS) == sum(len(x.split()) for x in aliases._SAME.values())
    assert not {f"--{name}" for name in theirs} & options
    elsewhere = {"--output", "--batch-size"}  # of plan, simulate, profile; of eval
    assert {f"--{ours}" for ours in aliases._SAME} <= options | elsewhere
    assert {words[0] for words in aliases._FLAGS.values()} <= options


def test_a_command_keeps_its_own_names():
    options = [option.name for option in options_of(PlanOptions())]
    words = ["--output", "--lr", "--wandb", "plan.json"]
    with pytest.raises(BadInput, match="metrics.jsonl"):
        aliases.in_our_words(words, options)
    own = ["--data", "x", "--batch-size", "8"]
    assert aliases.in_our_words(own, ["--data", "--batch-size"]) == own


def test_a_value_is_no_name(tmp_path: Path):
    found = config("--evaluation.prompt=--lr --data.path lr")
    assert found.evaluation.prompt == "--lr" and found.data.path == Path("lr")


@pytest.mark.parametrize(
    "former, now",
    {"patience": "timeout-scale", "foresee-after-s": "standby-plans-after-s"}.items(),
)
def test_options_keep_their_former_names_with_a_warning(former: str, now: str):
    with pytest.warns(UserWarning, match=f"--{former} is called --{now} now"):
        assert config(f"--{former} 2.5") == config(f"--{now} 2.5")


def test_former_names_stand_for_settings_that_there_are():
    present = {field.name for field in fields(RunConfig)}
    assert {*FORMER_NAMES.values()} <= present and not {*FORMER_NAMES} & present
