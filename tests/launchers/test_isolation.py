# SPDX-License-Identifier: Apache-2.0
"""Each worker sees only its devices, here and where it really starts."""

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.local_devices import LocalDevice
from hetjax.errors import BadInput
from hetjax.launchers.device_probe import may_be_unlike
from hetjax.launchers.isolation import (
    gpu_share,
    passed_on,
    visible_devices,
    worker_environments,
)
from hetjax.launchers.local_processes import OnThisMachine
from hetjax.training.layout import hardware
from hetjax.training.layout.hardware import (
    choose_hardware,
    cluster_of,
    with_needed_launcher,
)
from tests.launchers.cards import UUIDS, put_cards
from tests.training.small import but, small_preset

SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def devices(platform: str, kind: str, handles: str) -> list[LocalDevice]:
    return [
        LocalDevice(
            platform=platform, device_kind=kind, handle=handle, memory_bytes=16 << 30
        )
        for handle in handles.split(",")
    ]


def test_nodes_take_their_kind_in_order_hosts_share_it_and_cpus_see_no_card():
    a100, v100 = "A100-SXM4-80GB", "V100-SXM2-16GB"
    here = [
        *devices("cuda", f"NVIDIA {a100}", "GPU-a,GPU-b,GPU-c"),
        *devices("cuda", f"Tesla {v100}", "GPU-v"),
    ]
    cluster = Cluster(
        name="box",
        nodes=(
            Node(name="one", device=a100, count=1),
            Node(name="old", device=v100, count=1),
            Node(name="two", device=a100, count=2, hosts=2),
            Node(name="host", device="cpu", count=2),
        ),
    )
    found = worker_environments(cluster, here, {})
    assert {w: e["CUDA_VISIBLE_DEVICES"] for w, e in found.items()} == {
        "one": "GPU-a",
        "old": "GPU-v",
        "two/0": "GPU-b",
        "two/1": "GPU-c",
        "host": "-1",
    }
    assert {w for w, e in found.items() if e.get(SHARE) == "0.92"} == {*found} - {
        "host"
    }
    with pytest.raises(BadInput, match="'two' wants 2 x A100"):
        worker_environments(cluster, here[1:], {})


@pytest.mark.parametrize("own", [SHARE, "XLA_CLIENT_MEM_FRACTION"])
def test_the_share_that_the_user_sets_stays(own: str):
    here = devices("cuda", "NVIDIA L4", "GPU-a")
    cluster = Cluster(name="box", nodes=(Node(name="a", device="L4", count=1),))
    # JAX does not start with both variables
    assert SHARE not in worker_environments(cluster, here, {own: "0.5"})["a"]
    assert gpu_share({own: "0.5"}) == 0.5
    with pytest.raises(BadInput, match=f"{own}=92"):
        gpu_share({own: "92"})


def test_amd_cards_and_tpu_chips_have_variables_of_their_own():
    cards = devices("rocm", "AMD Instinct MI300X", "0,1,2")
    assert visible_devices(cards[1:], cards) == {"HIP_VISIBLE_DEVICES": "1,2"}
    chips = devices("tpu", "TPU v5 lite", "0,1,2,3")
    assert visible_devices(chips[2:], chips) == {
        "TPU_VISIBLE_CHIPS": "2,3",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1",
    }
    assert visible_devices(chips, chips) == {}
    cores = devices("tpu", "TPU v3", "0,0,1,1")
    assert visible_devices(cores[2:], cores)["TPU_VISIBLE_CHIPS"] == "1"


def test_variables_that_name_devices_of_this_machine_go_nowhere_else():
    passed = {"NCCL_IB_HCA": "mlx5", "LIBTPU_INIT_ARGS": "--x", "XLA_FLAGS": "--y"}
    passed |= {"JAX_PLATFORMS": "cuda,cpu", "TPU_MIN_LOG_LEVEL": "0", "PYTHONPATH": "."}
    own = dict.fromkeys(
        ["CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "TPU_WORKER_ID", "HOME"], "0"
    )
    assert passed_on(passed | own) == passed


def test_two_kinds_of_gpu_are_two_nodes_in_processes_that_see_one_card_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put_cards(tmp_path / "driver", monkeypatch)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr(hardware, "may_be_unlike", partial(may_be_unlike, tmp_path))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    preset = but(small_preset(tmp_path), simulate=False)
    config = with_needed_launcher(preset.config)
    assert (preset.config.launcher, config.launcher) == ("embedded", "processes")
    found = choose_hardware(config, preset)
    assert cluster_of(None) == found.cluster
    told = [(n.name, n.device, n.count) for n in found.cluster.nodes]
    assert [kind for _, kind, _ in told] == ["GeForce-RTX-3090", "GeForce-RTX-4090"]
    names = [name for name, _, _ in told]
    with ExitStack() as stack:
        launcher = OnThisMachine(
            tmp_path / "logs",
            stack,
            module="tests.launchers.telling_worker",
            cluster=found.cluster,
            environments=lambda c: worker_environments(c, found.here, {}),
        )
        launcher.start(names)
        logs = [(tmp_path / "logs" / f"{name}.log").read_text() for name in names]
    seen = [json.loads(log.splitlines()[0]) for log in logs]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in seen] == list(UUIDS)
    assert {(e[SHARE], e["NCCL_DEBUG"]) for e in seen} == {("0.92", "INFO")}


def test_one_process_is_enough_for_one_of_two_kinds_which_it_then_sees_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put_cards(tmp_path / "driver", monkeypatch)
    monkeypatch.setattr(hardware, "may_be_unlike", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    preset = but(small_preset(tmp_path), simulate=False)
    one = Cluster(name="one", nodes=(Node(name="new", device="RTX-4090", count=1),))
    assert with_needed_launcher(preset.config, one) == preset.config
    assert hardware.os.environ["CUDA_VISIBLE_DEVICES"] == UUIDS[1]
