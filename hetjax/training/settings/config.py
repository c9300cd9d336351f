# SPDX-License-Identifier: Apache-2.0
"""The settings of a training run: one frozen tree.

Owns the settings and their help texts (shown by `--help`). Does not own which values
are allowed (`checks.py`), how they are written and read (`values.py`),
named sets of them (`presets.py`) nor their file (`rundir.py`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hetjax.data.settings import DataConfig
from hetjax.launchers.table import LauncherName
from hetjax.models.finetuning import LoraConfig, TrainConfig
from hetjax.optimizers.settings import OptimizerConfig
from hetjax.plans.attention import Attention
from hetjax.plans.plan import OffloadChoice
from hetjax.plans.precision import Dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Validation loss and sampled text; also before the first step and at the end."""

    every: int = 500
    """Steps between evaluations; 0: only before the first and after the last."""
    num_batches: int = 8
    """Global batches of validation text per evaluation, always the same ones."""
    prompt: str = ""
    """Start of the sampled text; if empty, the start of a document."""
    sample_tokens: int = 48
    """Length of the sampled text in tokens; 0: none."""
    temperature: float = 0.8
    """Temperature of the sampled text; 0 always takes the most likely token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """State on disk, written while training continues, always after the last step."""

    every: int = 500
    """Steps between checkpoints; 0: only when the run ends or is stopped."""
    keep: int = 2
    """How many of the newest checkpoints to keep. The run also keeps the one with the
    lowest validation loss."""
    local: Path | None = None
    """Folder for checkpoints on each worker's machine; {worker} in the path stands for
    the worker's name. None: the run directory, or, on machines that do not see it, a
    folder in ~/.local/state/hetjax."""
    copies: int | None = None
    """How many nodes keep each slice, if nodes have disks of their own. None: 2 if
    machines do not see the run directory and there is no store, otherwise 1."""
    cloud: str | None = None
    """Store to copy checkpoints to while training continues: gs://BUCKET/PREFIX,
    s3://BUCKET/PREFIX or file:///FOLDER. At its end a run waits for the last copy, for
    at most an hour."""
    endpoint: str | None = None
    """S3-compatible server for --checkpoint.cloud s3://...: https://HOST:PORT, or
    http:// on a private network. None: AWS."""
    upload_mbit_per_s: float | None = None
    """Bandwidth limit for each worker's copies to the store; None: no limit."""
    key_file: Path | None = None
    """File of at least 32 random bytes, the same on every machine, to sign checkpoints
    with; the run refuses checkpoints without its signature. None: the run trusts
    everyone who can write to its folders and its store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsConfig:
    """Encryption of all messages between workers and their controller, by TLS 1.3."""

    cert: Path | None = None
    """The machine's certificate, a PEM file; the same path on every machine."""
    key: Path | None = None
    """The certificate's key, a PEM file."""
    ca: Path | None = None
    """Certificate of the authority that signed every machine's certificate, a PEM
    file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinConfig:
    """How machines join a run; with --launcher join."""

    address: str | None = None
    """This machine's address for machines that join, HOST:PORT; port 0: a free one."""
    wait_s: float = 1800.0
    """Seconds to wait at the start for every node to join; the run then starts without
    the missing ones."""
    token_s: float = 3600.0
    """Seconds until an unused join token expires."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """All settings of a run; the same command again resumes it.

    >>> sizes = {"steps": 20, "seq_len": 64, "global_batch": 48}
    >>> RunConfig(model="tiny", run_dir=Path("runs/mine"), **sizes).dtype
    'best'
    """

    model: str
    """The model: a preset; a Hugging Face folder or config.json, or a TOML file with
    the same fields; or a function that returns a model, package.module:function."""
    run_dir: Path
    """Directory of the run: settings, metrics, checkpoints. A run that it already holds
    is resumed."""
    steps: int
    """Steps in total; raising it later stretches the learning-rate schedule."""
    adopt: str | None = None
    """Identity of a run whose checkpoints are in the folders or the store, to resume
    it in this directory; error messages name it. None: resume only a run whose settings
    are all equal."""
    init: str | None = None
    """Initial weights: a Hugging Face folder, or OWNER/MODEL on the hub; None: random
    weights."""
    seed: int = 0
    """Seed of the initial weights and of the order of the text."""
    seq_len: int
    """Tokens per sequence."""
    global_batch: int
    """Sequences per step, over all replicas."""
    dtype: Dtype = "best"
    """Precision of computation; best: the best that each device has. Weights are kept
    in float32."""
    attention: Attention = "best"
    """How to compute attention; best: with each device's own kernel, if it has one."""
    deterministic: bool = False
    """Make GPUs of one kind compute the same bits every time; on an H200 a step took
    12.8 % longer. CPUs always do; TPUs should, but nobody has tried it."""
    loss_scale_init: float = 2.0**8
    """Initial loss scale for float16; it multiplies the loss summed over tokens."""
    loss_scale_growth_interval: int = 2_000
    """Good steps until the loss scale doubles; an overflow skips a step and halves the
    scale."""
    on_spike: Literal["warn", "skip", "rollback"] = "warn"
    """What to do when the loss spikes. warn: report it; skip: leave the weights as they
    were; rollback: return to the newest checkpoint and skip the batches since then."""
    spike_factor: float = 2.0
    """A loss is a spike if it exceeds this many times the median of recent losses."""
    spike_window: int = 64
    """How many recent losses the median covers; nothing is a spike until half as many
    are known."""
    digest_every: int = 20
    """Steps between checks that all replicas hold the same bits, besides the check at
    every checkpoint; 0: never."""
    cluster: Path | None = None
    """Cluster file, or lab, office or tiny; None: the preset's cluster, or the devices
    found here."""
    plan: Path | None = None
    """Plan file; None: the plan of the run directory or the preset, otherwise a new
    one."""
    planner: Literal["hetjax", "even"] = "hetjax"
    """Which planner makes a new plan; even splits evenly, whatever the devices and
    links."""
    microbatch_size: int = 1
    """Sequences per microbatch for planner even; planner hetjax tries this size among
    others."""
    offload: OffloadChoice = "none"
    """Where a new plan keeps float32 weights and optimizer state: none: on the devices;
    optimizer: on the hosts, which then run the update; auto: whichever planner hetjax
    finds best for each stage."""
    profile: Path | None = None
    """Measured times to plan with; None: profile.json of the run directory, if any."""
    calibration: Path | None = None
    """What to plan with until this run has measured its own steps: another run's
    calibration.json, the output of NCCL-tests, or none. By default, what earlier runs
    measured."""
    launcher: LauncherName = "embedded"
    hosts: Path | None = None
    """File that lists the machines for --launcher ssh."""
    transport: Literal["sockets", "transfer"] = "sockets"
    """What carries activations between workers; transfer: JAX's transfer server."""
    gradient_wire: Literal["float32", "bfloat16"] = "float32"
    """Precision of gradients between workers; bfloat16 halves the bytes but rounds."""
    recovery: Literal["local-first", "cloud-only", "none"] = "local-first"
    """What to do when a worker is lost. local-first: restore its state from the nearest
    place that has it; cloud-only, for comparison: always from --checkpoint.cloud; none:
    end the run, and keep the plan when nodes come or leave."""
    reroute: bool = False
    """When a worker is lost, let the remaining replicas process its samples at once and
    continue while it restarts; losses are then equal up to rounding."""
    standby_plans_after_s: float = 60.0
    """Seconds of training until the run plans for the loss of each node and compiles
    these plans in the background, if workers are separate processes; 0: never."""
    timeout_scale: float = 1.0
    """Factor on every timeout after which a worker counts as lost. A step has 30
    minutes at most, usually less: see watchdog-factor."""
    watchdog_factor: float = 10.0
    """How many times its expected duration a step, save or restore may take (at least a
    minute) before the worker logs where it hangs and counts as lost."""
    watch_speeds: Literal["auto", "on", "off"] = "auto"
    """Whether to time stages in every step and report what becomes slow. auto: yes,
    unless devices are simulated, because these share the machine's cores."""
    replan: Literal["say", "auto", "never"] = "say"
    """What to do when something has become slow, or recovered, and another plan gains
    more than the move costs with a probability of 90 %. say: report it; auto: move;
    never: do not search."""
    simulate: bool = False
    """Simulate the cluster's devices with CPU devices."""
    platform: Literal["auto", "cpu"] = "auto"
    """What to run on. auto: what JAX finds, but not the CPU if the machine has a GPU or
    TPU that JAX does not use; cpu: the CPU in any case."""
    stop_after: int | None = None
    """Save and stop after this many steps of this start, as if preempted."""
    max_hours: float | None = None
    """Save and stop after this many hours of this start, as if preempted."""
    trace: bool = False
    """Write a timeline of a few steps to trace.json, to open in ui.perfetto.dev."""
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    join: JoinConfig = field(default_factory=JoinConfig)


def is_virtual(config: RunConfig) -> bool:
    """Return whether the run uses only CPUs, whatever is here."""
    return config.simulate or config.platform == "cpu"
