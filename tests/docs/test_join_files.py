# SPDX-License-Identifier: Apache-2.0
"""The files of docs/join: their YAML is valid, and so are our commands in it."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from hetjax.cli.train import parse as parse_train
from hetjax.cli.worker import parse as parse_worker
from hetjax.comm.pinned import read_fingerprint
from hetjax.launchers.joining.tokens import JoinTokens
from hetjax.names import is_worker
from hetjax.training.settings.checks import check_config
from tests.docs.test_pages import ROOT

FOLDER = ROOT / "docs" / "join"
PAGE = (ROOT / "docs" / "join.md").read_text(encoding="utf-8")
FINGERPRINT = f"sha256:{'0' * 64}"


def documents(name: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))]


def in_shell(script: str, values: dict[str, str]) -> Iterator[list[str]]:
    """Yield the words of our commands in a script, with values for its variables."""
    script = re.sub(r"\$\(cat \S*/join/fingerprint\)", FINGERPRINT, script)
    script = re.sub(r"\$(\w+)", lambda found: values[found[1]], script)
    for line in script.splitlines():
        words = shlex.split(line)
        if "hetjax" in words[:2]:
            yield words[words.index("hetjax") + 1 :]


def check(words: list[str]) -> None:
    """Check one of our commands, as far as possible before anything runs."""
    name, *arguments = words
    if name == "train":
        check_config(parse_train(arguments)[0])
        return
    assert name == "worker"
    options = parse_worker(arguments)
    assert options.join and options.fingerprint and options.token_file
    read_fingerprint(options.fingerprint)
    assert is_worker(options.node)
    assert options.token_file.name in ("join.token", f"{options.node}.token")


def test_a_machine_of_skypilot_joins():
    (task,) = documents("skypilot.yaml")
    commands = [*in_shell(task["run"], task["envs"])]
    assert len(commands) == 1
    check(commands[0])
    (token,) = task["file_mounts"].items()
    assert token == ("~/join.token", f"runs/lab/join/{task['envs']['NODE']}.token")
    assert "chmod 600 ~/join.token" in task["run"]


def test_pods_of_gke_join():
    service, *jobs = documents("gke.yaml")
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    commands = []
    for job in jobs:
        pod = job["spec"]["template"]["spec"]
        assert pod["restartPolicy"] == "OnFailure"
        (container,) = pod["containers"]
        command = container["command"]
        if command[:2] == ["sh", "-c"]:
            commands += in_shell(command[2], {})
        else:
            address = [word.replace("$(POD_IP)", "10.0.0.1") for word in command]
            assert container["env"][0]["name"] == "POD_IP"
            assert address[0] == "hetjax"
            commands.append(address[1:])
        for mount in container["volumeMounts"]:
            assert mount["name"] in [volume["name"] for volume in pod["volumes"]]
    for command in commands:
        check(command)
    train, worker = commands
    config, options = parse_train(train[1:])[0], parse_worker(worker[1:])
    port = service["spec"]["ports"][0]["port"]
    assert options.join == f"{service['metadata']['name']}:{port}"
    assert config.join.address == f"10.0.0.1:{port}"
    assert options.token_file is not None and options.node is not None
    written = JoinTokens(config.run_dir / "join", 1.0).file(options.node)
    assert options.token_file == written


@pytest.mark.parametrize("name", [path.name for path in FOLDER.iterdir()])
def test_each_file_is_linked_from_the_page(name: str):
    assert f"(join/{name})" in PAGE
