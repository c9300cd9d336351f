# SPDX-License-Identifier: Apache-2.0
"""The files of docs/ray: Ray reads its own, and our commands in them are valid."""

import re
import shlex
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from hetjax.cli.train import parse
from hetjax.training.settings.checks import check_config
from tests.docs.test_pages import ROOT

FOLDER = ROOT / "docs" / "ray"
PAGE = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")


def content(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def test_ray_up_starts_all_machines_of_the_file():
    config = prepare_config(content("own-machines.yaml"))
    validate_config(config)
    (kind,) = config["available_node_types"].values()
    machines = len(config["provider"]["worker_ips"])
    assert kind["min_workers"] == kind["max_workers"] == machines
    head = config["head_start_ray_commands"][-1]
    assert "RAY_enable_autoscaler_v2=0" in head  # the newer one starts one machine


def test_the_ports_of_head_and_workers_are_the_same():
    config = content("own-machines.yaml")
    (head,) = re.findall(r"--port=(\d+)", config["head_start_ray_commands"][-1])
    assert f"$RAY_HEAD_IP:{head}" in config["worker_start_ray_commands"][-1]


def test_a_job_of_kuberay_is_a_run_on_unlike_cards_that_share_nothing():
    job = content("kuberay.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, command, *words = shlex.split(job["spec"]["entrypoint"])
    assert (program, command) == ("hetjax", "train")
    settings = parse(words)[0]
    check_config(settings)
    assert settings.launcher == "ray" and settings.checkpoint.cloud
    cluster = job["spec"]["rayClusterSpec"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    (mount,) = head["containers"][0]["volumeMounts"]
    assert mount["name"] == head["volumes"][0]["name"]
    for path in (settings.run_dir, settings.data.path):
        assert str(path).startswith(mount["mountPath"])
    groups = cluster["workerGroupSpecs"]
    for group in groups:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
        pod = group["template"]["spec"]
        assert "volumes" not in pod
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] > 0
    assert len({group["groupName"] for group in groups}) == len(groups) > 1


@pytest.mark.parametrize("name", [path.name for path in FOLDER.iterdir()])
def test_each_file_is_linked_from_the_page(name: str):
    assert f"(ray/{name})" in PAGE
