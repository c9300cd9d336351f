# SPDX-License-Identifier: Apache-2.0
"""Help in two lengths, completion in a real shell, colours on a terminal, quiet."""

import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from hetjax.__main__ import COMMANDS, main
from hetjax.cli.command import main_of, print_result
from hetjax.report.progress import is_quiet
from hetjax.training.settings.checks import option
from hetjax.training.settings.presets import preset
from hetjax.training.settings.values import flat_values

MANY = [["train", "tiny"], ["plan"], ["simulate"], ["sample"], ["eval"]]
COLOUR = re.compile("\x1b\\[[0-9;]*3[0-7]")


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        assert main(words) == 0
    except SystemExit as ended:
        assert not ended.code
    return capsys.readouterr().out


def options_in(text: str) -> set[str]:
    """Return the options that have their own row in a box, which -h shares."""
    return set(re.findall(r"(?m)^(?:│ |  )(--\w[\w.-]*)", text))


@pytest.mark.parametrize("words", MANY, ids=" ".join)
def test_help_lists_ten_options_and_says_where_all_are(
    words: list[str], capsys: pytest.CaptureFixture[str]
):
    short = printed([*words, "--help"], capsys)
    full = printed([*words, "--help-all"], capsys)
    assert "--help-all lists every option" in short
    assert 8 <= len(options_in(short)) <= 10
    assert options_in(short) < options_in(full)


def test_help_on_all_has_every_setting_of_a_run(capsys: pytest.CaptureFixture[str]):
    shown = options_in(printed(["train", "tiny", "--help-all"], capsys))
    settings = {option(name) for name in flat_values(preset("tiny").config)}
    assert shown == {*settings, "--observer", "--reprovision"}  # which are not kept


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]):
    assert printed(["help"], capsys) == printed(["--help"], capsys)
    helped = printed(["help", "doctor"], capsys)
    assert helped == printed(["doctor", "--help"], capsys)


# What each shell runs on a tab: bash, and other shells if installed.
AS_BASH = """. {script}
COMP_WORDS=({typed} "{last}")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_hetjax
printf '%s\\n' "${{COMPREPLY[@]}}\""""
# after bash's function, zsh drops what does not begin as typed
AS_ZSH = f"{AS_BASH} | grep -- '^{{last}}'"
ON_TAB = {
    "bash": AS_BASH,
    "zsh": AS_ZSH.replace("COMP_WORDS=", "emulate ksh\nCOMP_WORDS=", 1),
    "fish": "source {script}\ncomplete -C '{typed} {last}'",
}
SHELLS = ["bash", *(name for name in ("zsh", "fish") if which(name))]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_presets_and_options(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    script = tmp_path / "script"
    script.write_text(printed(["completion", shell], capsys))

    def completed(*words: str) -> list[str]:
        typed = {"script": script, "typed": " ".join(words[:-1]), "last": words[-1]}
        asked = [shell, "-c", ON_TAB[shell].format(**typed)]
        env = os.environ | {"HOME": str(tmp_path), "ZDOTDIR": str(tmp_path)}
        done = subprocess.run(
            asked, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL
        )
        assert not done.stderr
        return sorted(done.stdout.split())

    assert completed("hetjax", "") == sorted(COMMANDS)
    assert completed("hetjax", "pr") == ["preempt", "profile"]
    assert completed("hetjax", "train", "ti") == ["tiny"]
    assert completed("hetjax", "train", "tiny", "--optimizer.b") == [
        "--optimizer.beta1",
        "--optimizer.beta2",
    ]
    for name in COMMANDS:
        assert completed("hetjax", name, "--help") == ["--help", "--help-all"], name


def test_a_shell_that_nothing_is_known_of_is_refused_with_those_that_are(
    capsys: pytest.CaptureFixture[str],
):
    assert main(["completion", "powershell"]) == 2
    assert "one of bash, zsh, fish" in capsys.readouterr().err


def on_terminal(words: list[str], **environment: str) -> str:
    ours, theirs = os.openpty()
    env = os.environ | {"TERM": "xterm"} | environment
    command = [sys.executable, "-m", "hetjax", *words]
    child = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    screen = b""
    try:
        while piece := os.read(ours, 65_536):
            screen += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    child.wait()
    return screen.decode()


@pytest.mark.parametrize("words", [["trian"], ["eval", "--help"]], ids=" ".join)
def test_a_terminal_has_colours_unless_they_are_unwanted(words: list[str]):
    assert COLOUR.search(on_terminal(words))
    assert not COLOUR.search(on_terminal(words, NO_COLOR="1"))
    assert not COLOUR.search(on_terminal(words, TERM="dumb"))


def test_warnings_of_a_result_are_red_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    lines = ["gpt2: 8 [sequences]", "warning: the gap is 60%", "step time 1 ms"]
    print_result("\n".join(lines))
    assert capsys.readouterr().out.splitlines() == lines
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if this were a terminal
    print_result("\n".join(lines))
    shown = capsys.readouterr().out.splitlines()
    assert [bool(COLOUR.search(line)) for line in shown] == [False, True, False]
    assert lines[1] in shown[1]


def test_a_quiet_command_prints_its_result_alone(capfd: pytest.CaptureFixture[str]):
    asked = ["simulate", "tiny"]
    assert main(asked) == 0
    result = capfd.readouterr().out
    assert main([*asked, "-q"]) == 0
    assert capfd.readouterr() == (result, "")


@pytest.mark.parametrize("word", ["-q", "--quiet"])
def test_every_command_is_quiet_if_asked_and_only_then(word: str):
    seen: list[tuple[list[str], bool]] = []
    command = main_of(lambda given: seen.append(([*given], is_quiet())))
    assert command(["tiny", word]) == command(["tiny"]) == 0
    assert seen == [(["tiny"], True), (["tiny"], False)]
