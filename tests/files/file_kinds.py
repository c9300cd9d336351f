# SPDX-License-Identifier: Apache-2.0
"""The kinds of file that hetjax reads: how to make a valid one, and its reader.

A kind is `hashed` if the file holds a checksum or a signature: then no altered content
may be accepted, and the step before is used instead. Does not own changes to files
(`mutations.py`).
"""

import base64
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from hetjax.api.trained_sources import find_trained
from hetjax.checkpoint.disk import read_manifest
from hetjax.checkpoint.fetching import fetch_newest
from hetjax.checkpoint.leases.lease import LeaseHeld, acquire
from hetjax.checkpoint.reader import Checkpoint, newest, partial_checkpoints, steps
from hetjax.checkpoint.stored_steps import committed_lease, in_store
from hetjax.checkpoint.stores.local import FileStore
from hetjax.checkpoint.stores.store import CorruptData
from hetjax.checkpoint.uploader import Uploader
from hetjax.checkpoint.writer import CheckpointWriter
from hetjax.cluster.cluster_files import load_cluster, preset_path
from hetjax.cluster.hosts import load_hosts
from hetjax.costs.certainty.beliefs import Observation
from hetjax.costs.certainty.calibration import StepCalibration, write_calibration
from hetjax.costs.certainty.elasticities import SOFTWARE
from hetjax.costs.certainty.given import read_given
from hetjax.costs.certainty.kept import KeptStep, kept_json, parse_kept
from hetjax.costs.measured.compiled import read_compiled, write_compiled
from hetjax.costs.measured.layer_profile import read_profile, write_profile
from hetjax.costs.measured.sailor import sailor_profile
from hetjax.costs.slowness.known import read_slowness, slowness, write_slowness
from hetjax.data.hugging_face import read_tokenizer
from hetjax.files.parsing import read_file
from hetjax.files.reading import read_bytes
from hetjax.models.hugging_face.adapter_config import read_adapter_config
from hetjax.models.hugging_face.configs import read_config
from hetjax.models.hugging_face.stored_tensors import Tensors
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.plans.plan_files import read_plan
from hetjax.profiling import found_here
from hetjax.profiling.probe import Probe
from hetjax.report.journals import Events, Metrics
from hetjax.report.run_record import RunRecord
from hetjax.report.run_report import RunReport
from hetjax.runtime.rpc.encoding import decode, encode
from hetjax.runtime.rpc.schema import Train
from hetjax.schedule.programs.action import parse_program
from hetjax.schedule.simulation.trace import Span, perfetto
from hetjax.training.directory import rundir
from hetjax.training.directory.best import BestCheckpoint
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.progress import evaluated, last_saved
from hetjax.training.observers import run_reports
from hetjax.training.recovery.notice_sources import operator
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.values import config_values, flat_values
from tests.checkpoint.values import state_of
from tests.cluster.test_hosts import WHOLE
from tests.costs.test_nccl_tests import output as nccl_output
from tests.files.data_kinds import DATA_KINDS
from tests.files.file_kind import FileKind, written

ROOT = Path(__file__).parents[2]
_MODELS = ROOT / "tests/models/hugging_face/fixtures"
_TOKENIZER = ROOT / "tests/data/tokenizers/chatml"
_KEY = b"k" * 32


def _copied(source: Path, *names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in names:
            shutil.copyfile(source / name, folder / name)

    return make


def _run(folder: Path) -> None:
    config = RunConfig(
        model="tiny", run_dir=folder, steps=10, seq_len=64, global_batch=48
    )
    values = {
        "config": config_values(config),
        "dataset": {"directory": str(folder), "sha256": {"train.npy": "00"}},
    }
    (folder / rundir.CONFIG).write_text(json.dumps(values, indent=2))
    shutil.copyfile(preset_path("tiny"), folder / rundir.CLUSTER)
    shutil.copyfile(
        ROOT / "hetjax/training/settings/plans/tiny.json", folder / rundir.PLAN
    )
    lines = [
        {"step": n, "loss": 2.5, "tokens": 9, "step_time_s": 0.5, "tokens_per_s": 18.0}
        for n in range(1, 4)
    ]
    lines.append({"step": 3, "val_loss": 2.25, "val_bits_per_byte": 1.5})
    _lines(folder / rundir.METRICS, lines)
    time = {"time": "2026-08-01T09:30:00+00:00"}
    events: list[dict[str, Any]] = [
        {"event": "started", "step": 0, "plan": "preset"},
        {"event": "saved", "step": 2},
        {
            "event": "recovered",
            "step": 2,
            "reason": "a is gone",
            "started": ["a"],
            "lost_steps": 1,
            "bytes": {"memory": 512},
            "tier_s": {"memory": 0.5},
            "seconds": {"restore": 1.5},
        },
        {"event": "goodput", "step": 3, "productive_s": 1.5, "lost_s": 0.5},
        {"event": "finished", "step": 3},
    ]
    _lines(folder / rundir.EVENTS, [event | time for event in events])


def _lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _read_run(folder: Path) -> Any:
    """Return what `train` reads when it resumes, and what notebooks and pages show."""
    previous = rundir.read_previous(folder)
    if previous is None:
        return "no run"
    metrics = read_journal(folder / rundir.METRICS)
    events = read_journal(folder / rundir.EVENTS)
    record = RunRecord(
        run_dir=folder,
        settings=flat_values(previous.config),
        cluster=previous.cluster,
        plan=previous.needed_plan(),
        metrics=metrics,
        events=events,
        predicted=None,
        why_not_predicted="not asked",
        is_simulated=True,
        usd_per_hour=None,
    )
    return (
        *(previous, last_saved(events), evaluated(folder)),
        *(str(Metrics(metrics)), str(Events(events)), Events(events)._repr_html_()),
        BestCheckpoint.before(metrics, events, 2).step,
        *(RunReport(record).values(), len(RunReport(record)._repr_html_())),
    )


def _saved(folder: Path, key: bytes | None = None, step: int = 0) -> None:
    """Save two steps on a disk and in a store."""
    store = FileStore(folder / "store")
    uploader = Uploader(store, folder / "disk", "a", key=key)
    with CheckpointWriter(folder / "disk", "a", uploader=uploader, key=key) as writer:
        for step in (10, 20):
            host = {"run": {"seed": 1}, "loss_scale": {"value": 8.0, "since": 3}}
            writer.save(step, state_of(step, num_entries=1), host=host)
            writer.wait()
            uploader.wait()
        for name in ("disk", "store"):
            assert (folder / name / "step_00000020").exists()


def _on_disk(key: bytes | None = None) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        """Return the newest valid step, which exists even if one is damaged."""
        found = newest(folder / "disk", key)
        assert found is not None
        read_manifest(folder / "disk/step_00000020/a")
        partial_checkpoints(folder / "disk", key)
        assert found.step in steps(folder / "disk", key)
        return found.step, _values(found), dict(found.host)

    return read


def _in_store(key: bytes | None = None) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        """Return the store's newest valid step, fetched into an empty folder."""
        store = FileStore(folder / "store")
        saves = [one.save for one in in_store(store, key)]
        with suppress(CorruptData):
            committed_lease(store, 20)
        shutil.rmtree(folder / "here", ignore_errors=True)
        fetched = fetch_newest(store, folder / "here", -1, key)
        found = newest(folder / "here", key)
        assert fetched is not None and found is not None
        assert saves[-1][0] == fetched.step == found.step
        return found.step, _values(found), dict(found.host)

    return read


def _values(found: Checkpoint) -> bytes:
    """Return its values; raise the damage that prevents reading them."""
    return b"".join(
        found.read(entry).tobytes() for entry, _ in state_of(found.step, num_entries=1)
    )


def _sealed(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with its matching checksum, as a forger writes it."""
    rest = {key: value for key, value in body.items() if key != "crc32c"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    checksum = google_crc32c.Checksum(canonical).digest()
    return {"crc32c": base64.b64encode(checksum).decode(), **rest}


def _leased(folder: Path) -> None:
    acquire(FileStore(folder / "store"), "it", renew_s=1e6)  # never released


def _read_lease(folder: Path) -> Any:
    """Return "taken", or the refusal that names the holder."""
    try:
        acquire(FileStore(folder / "store"), "it", lease_s=0.02, renew_s=9.0).release()
    except LeaseHeld as held:
        return held.got
    finally:
        shutil.rmtree(folder / "store/lease/0000000002", ignore_errors=True)
    return "taken"


def _tokenizer(folder: Path) -> None:
    for path in _TOKENIZER.iterdir():
        shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": (folder / "chat_template.jinja").read_text()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink()
    (folder / "special_tokens_map.json").write_text('{"unk_token": {"content": "!"}}')


def _read_tokenizer(folder: Path) -> Any:
    found = read_tokenizer(folder)
    return found.ids.encode("hello, world"), found.ids.end_of_document, found.template


def _model(folder: Path) -> None:
    _tokenizer(folder)
    _copied(_MODELS / "llama3", "config.json", "model.safetensors")(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')


def _chats(folder: Path) -> None:
    """Write a model with a row per token of its tokenizer; weights do not matter."""
    _model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 4096}))


def _in_shards(folder: Path) -> None:
    _model(folder)
    names = Tensors(folder).places
    shutil.move(folder / "model.safetensors", folder / "a.safetensors")
    found = {"weight_map": {name: "a.safetensors" for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(found))


def _read_adapters(folder: Path) -> Any:
    config = read_adapter_config(folder)
    modules = ("layers.0.attn.q", "x" * 300)
    return config.base, [(config.rank_of(m), config.scale(m)) for m in modules]


def _probed(folder: Path) -> None:
    measured = Probe(
        tflops={"float32": 1.5, "bfloat16": 9.0},
        memory_gib=8.0,
        memory_gb_per_s=200.0,
        host_gb_per_s=12.0,
        seconds=3.0,
    )
    assert found_here._keep(folder / "probe.json", measured).startswith("kept in")


def _traced(folder: Path) -> None:
    action = parse_program("r0.s0.F0")[0]
    spans = [Span("a", 0, action, 0.5, 1.5), Span("b", 1, action, 1.0, 2.0, "sends")]
    (folder / "trace.json").write_text(json.dumps(perfetto(spans)))


def _read_weights(folder: Path) -> Any:
    weights = FolderWeights(folder)
    tensors = weights.tensors
    return [(name, tensors.read(name).tobytes()) for name in sorted(tensors.places)]


def _profile(folder: Path) -> None:
    written("times.json", _TIMES)(folder)
    write_profile(folder / "profile.json", _read_sailor(folder))


def _read_sailor(folder: Path) -> Any:
    return sailor_profile(
        folder / "times.json", model="OPT", device="GH-96", seq_len=2048
    )


def _asked(folder: Path) -> Any:
    """Return the operator's notice; a damaged file asks the whole run to stop."""
    return next(operator(folder))


_ADAPTERS = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "a/base",
    "r": 8,
    "lora_alpha": 16,
    "rank_pattern": {"attn.q": 4, "^layers.1.": 2},
    "alpha_pattern": {},
    "target_modules": ["q_proj"],
    "use_rslora": False,
    "bias": "none",
}
_TIMES = {
    size: {"1": {str(layer): [0.5, 1.0, 0.25] for layer in range(4)}} for size in "12"
}
_CLUSTER = ROOT / "hetjax/cluster/presets/lab.toml"
_MESSAGE = Train(step=3, turn=1, traced=False)
_MANIFEST = "step_00000020/a/manifest.json"
_TOML = """
model_type = "llama"
vocab_size = 64
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 4
max_position_embeddings = 64
rope_parameters = { rope_type = "default", rope_theta = 10_000.0 }
"""
_STEP = Observation(
    measured_s=2.0,
    predicted_s=1.5,
    elasticities={SOFTWARE: 1.0, ("L4", "products"): 0.75},
    noise=0.03,
)
_WORK = replace(_STEP, measured_s=0.5, predicted_s=0.4, what="work")
_CONFIGS = ("llama3", "gemma3", "gpt2", "qwen3_moe", "qwen2_window", "mixtral")

KINDS: Mapping[str, FileKind] = {
    "cluster": FileKind(
        make=lambda folder: shutil.copyfile(_CLUSTER, folder / "c.toml"),
        target="c.toml",
        read=lambda folder: load_cluster(folder / "c.toml"),
    ),
    "hosts": FileKind(
        make=written("hosts.toml", WHOLE),
        target="hosts.toml",
        read=lambda folder: load_hosts(folder / "hosts.toml"),
    ),
    "plan": FileKind(
        make=_run,
        target="plan.json",
        read=lambda folder: read_plan(folder / "plan.json"),
    ),
    "profile": FileKind(
        make=_profile,
        target="profile.json",
        read=lambda folder: read_profile(folder / "profile.json"),
    ),
    "calibration": FileKind(
        make=lambda folder: write_calibration(
            folder / "c.json", StepCalibration((_WORK, _STEP))
        ),
        target="c.json",
        read=lambda folder: read_given(folder / "c.json"),
    ),
    "steps of earlier runs": FileKind(
        make=written(
            "kept.json", kept_json([KeptStep({"L4": "bfloat16"}, (_WORK, _STEP))])
        ),
        target="kept.json",
        read=lambda folder: read_file(folder / "kept.json", parse_kept, what="kept"),
    ),
    "NCCL-tests": FileKind(
        make=written("nccl.txt", nccl_output()),
        target="nccl.txt",
        read=lambda folder: read_given(folder / "nccl.txt"),
    ),
    "Sailor's times": FileKind(make=_profile, target="times.json", read=_read_sailor),
    "compiled programs": FileKind(
        make=lambda folder: write_compiled(
            folder / "c.json", {"p": {"F": 10, "UPDATE": 9}}
        ),
        target="c.json",
        read=lambda folder: read_compiled(folder / "c.json"),
    ),
    **{
        f"run's {name}": FileKind(make=_run, target=name, read=_read_run)
        for name in ("config.json", "metrics.jsonl", "events.jsonl")
    },
    "request to leave": FileKind(
        make=written("preempt", '{"node": "a"}'), target="preempt", read=_asked
    ),
    "manifest": FileKind(
        make=_saved, target=f"disk/{_MANIFEST}", read=_on_disk(), hashed=True
    ),
    "manifest, sealed": FileKind(
        make=_saved, target=f"disk/{_MANIFEST}", read=_on_disk(), seal=_sealed
    ),
    "manifest, signed": FileKind(
        make=lambda folder: _saved(folder, _KEY),
        target=f"disk/{_MANIFEST}",
        read=_on_disk(_KEY),
        hashed=True,
    ),
    "stored manifest": FileKind(
        make=_saved, target=f"store/{_MANIFEST}", read=_in_store(), hashed=True
    ),
    "COMMIT": FileKind(
        make=_saved, target="store/step_00000020/COMMIT", read=_in_store(), hashed=True
    ),
    "COMMIT, signed": FileKind(
        make=lambda folder: _saved(folder, _KEY),
        target="store/step_00000020/COMMIT",
        read=_in_store(_KEY),
        hashed=True,
    ),
    "holder of a lease": FileKind(
        make=_leased, target="store/lease/0000000001/holder", read=_read_lease
    ),
    **{
        f"config of {family}": FileKind(
            make=_copied(_MODELS / family, "config.json"),
            target="config.json",
            read=read_config,
        )
        for family in _CONFIGS
    },
    "config in TOML": FileKind(
        make=written("m.toml", _TOML),
        target="m.toml",
        read=lambda f: read_config(f / "m.toml"),
    ),
    **{
        name: FileKind(make=_tokenizer, target=name, read=_read_tokenizer)
        for name in (
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
        )
    },
    "generation_config.json": FileKind(
        make=_chats,
        target="generation_config.json",
        read=lambda folder: find_trained(folder).ends,
    ),
    "safetensors": FileKind(
        make=_model, target="model.safetensors", read=_read_weights
    ),
    "adapters' config": FileKind(
        make=written("adapter_config.json", _ADAPTERS),
        target="adapter_config.json",
        read=_read_adapters,
    ),
    "measured device": FileKind(
        make=_probed,
        target="probe.json",
        read=lambda folder: found_here._read(folder / "probe.json"),
    ),
    "run's slow.json": FileKind(
        make=lambda folder: write_slowness(
            folder / "slow.json", slowness({"a": 1.5}, {("a", "b"): 2.0})
        ),
        target="slow.json",
        read=lambda folder: read_slowness(folder / "slow.json"),
    ),
    "run's trace.json": FileKind(
        make=_traced,
        target="trace.json",
        read=lambda folder: run_reports._traced(folder / "trace.json"),
    ),
    "index of safetensors": FileKind(
        make=_in_shards, target="model.safetensors.index.json", read=_read_weights
    ),
    **DATA_KINDS,
    "message": FileKind(
        kinds_of_file=(),
        make=lambda folder: (folder / "m").write_bytes(encode(_MESSAGE).tobytes()),
        target="m",
        read=lambda f: decode(np.frombuffer(read_bytes(f / "m"), np.uint8), Train),
    ),
}
