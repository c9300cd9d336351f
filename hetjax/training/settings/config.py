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
    """Validation loss and a sampled text; also before the first step and at the end."""

    every: int = 500
    """Steps between evaluations; 0: only before the first and after the last."""
    num_batches: int = 8
    """How many global batches of validation text, always the same ones."""
    prompt: str = ""
    """Start of the sampled text; empty: the start of a document."""
    sample_tokens: int = 48
    """Length of the sampled text in tokens; 0: none."""
    temperature: float = 0.8
    """Temperature of the sampled text; 0 takes the likeliest token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """State on disk, written while training goes on, and always after the last step."""

    every: int = 500
    """Steps between checkpoints; 0: only when the run ends or is stopped."""
    keep: int = 2
    """How many checkpoints are kept: the newest, and beside them the best of those at
    which the run was evaluated."""
    local: Path | None = None
    """Folder for checkpoints on each worker's own machine; {worker} in it is replaced
    by the worker's name. None: the run directory; on machines that do not see that, a
    folder of the run in ~/.local/state/hetjax."""
    copies: int | None = None
    """How many nodes keep each slice on their disks, where these are their own. None:
    2 where machines do not see the run directory and there is no store, else 1."""
    cloud: str | None = None
    """Store to copy checkpoints to while training goes on: gs://BUCKET/PREFIX,
    s3://BUCKET/PREFIX or file:///FOLDER. A run that ends waits for the last copy, an
    hour at most."""
    endpoint: str | None = None
    """Server that speaks S3, for --checkpoint.cloud s3://...: https://HOST:PORT, or
    http:// where nobody else is on the network. None: AWS."""
    upload_mbit_per_s: float | None = None
    """Limit on what copying may take of a worker's network; None: no limit."""
    key_file: Path | None = None
    """File of 32 or more random bytes on every machine, which checkpoints are signed
    with: others are refused. None: whoever may write where they are is trusted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsConfig:
    """Encryption of what workers and their controller send each other, by TLS 1.3."""

    cert: Path | None = None
    """Certificate of the machine, a PEM file; under the same path on all of them."""
    key: Path | None = None
    """Its key, a PEM file."""
    ca: Path | None = None
    """Certificate of the authority that has signed all of them, a PEM file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinConfig:
    """How machines join a run by themselves; with --launcher join."""

    address: str | None = None
    """Address of this machine at which they call, HOST:PORT; port 0: any."""
    wait_s: float = 1800.0
    """Seconds that the run waits at its start for nodes as which none has joined; then
    it goes on without those."""
    token_s: float = 3600.0
    """Seconds for which a token to join with lasts, unless it is used before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """All settings of a run; the same command again resumes it.

    >>> sizes = {"steps": 20, "seq_len": 64, "global_batch": 48}
    >>> RunConfig(model="tiny", run_dir=Path("runs/mine"), **sizes).dtype
    'best'
    """

    model: str
    """A preset of models; a folder or config.json of Hugging Face, or a TOML file with
    its fields; or a function that gives a model, package.module:function."""
    run_dir: Path
    """Directory of the run: settings, metrics, checkpoints; resumed if it is there."""
    steps: int
    """Steps in all; raising it later stretches the learning-rate schedule."""
    adopt: str | None = None
    """Run whose checkpoints are in the folders or the store, to go on with it in this
    directory; errors name it. None: only one with all settings equal."""
    init: str | None = None
    """Weights to begin with: a folder of Hugging Face, or OWNER/MODEL on its hub; None:
    random ones."""
    seed: int = 0
    """Seed of the initial weights and of the order of the text."""
    seq_len: int
    """Tokens per sequence."""
    global_batch: int
    """Sequences per step, over all replicas."""
    dtype: Dtype = "best"
    """Precision of computation; best: each device's. Weights are kept in float32."""
    attention: Attention = "best"
    """How attention is computed; best: by each device's own kernel, if it has one."""
    deterministic: bool = False
    """Let GPUs compute the same bits again each time, on cards of one kind; a step took
    12.8 % longer on an H200. CPUs and TPUs do so in any case."""
    loss_scale_init: float = 2.0**8
    """What gradients of the sum over tokens are multiplied by at first for float16."""
    loss_scale_growth_interval: int = 2_000
    """Good steps after which that is doubled; a bad one is skipped, and halves it."""
    on_spike: Literal["warn", "skip", "rollback"] = "warn"
    """What a loss far beyond the usual does. warn: is reported; skip: its step changes
    no weights; rollback: back to the newest checkpoint, without the batches since."""
    spike_factor: float = 2.0
    """How many times the median of the losses before it a loss is, to be a spike."""
    spike_window: int = 64
    """Losses of which that median is; of the first half of them none is a spike."""
    digest_every: int = 20
    """Steps between comparisons of what replicas hold, of which there is one at every
    checkpoint, too; 0: never."""
    cluster: Path | None = None
    """Cluster file, or lab, office or tiny; None: the preset's, or the devices here."""
    plan: Path | None = None
    """Plan file; None: the run directory's, the preset's, or the planner's."""
    planner: Literal["hetjax", "even"] = "hetjax"
    """Who plans where no plan file is given; even ignores devices and links."""
    microbatch_size: int = 1
    """Sequences per microbatch of planner even; hetjax tries it among others."""
    offload: OffloadChoice = "none"
    """Where a plan that is made here has masters and optimizer state: on the devices
    (none), on the hosts, which then update them (optimizer), or either, stage by stage,
    as planner hetjax finds best (auto)."""
    profile: Path | None = None
    """Measured times to plan with; None: profile.json of the run directory, if any."""
    calibration: Path | None = None
    """What another run measured of its steps, its calibration.json, what NCCL-tests
    printed, or none, to plan with until this run has its own; None: what earlier runs
    taught."""
    launcher: LauncherName = "embedded"
    hosts: Path | None = None
    """File of the machines that launcher ssh reaches."""
    transport: Literal["sockets", "transfer"] = "sockets"
    """What carries activations between workers; transfer: JAX's own server."""
    gradient_wire: Literal["float32", "bfloat16"] = "float32"
    """Precision of gradients between workers; bfloat16 halves the bytes, and rounds."""
    recovery: Literal["local-first", "cloud-only", "none"] = "local-first"
    """Where state comes from when a worker is lost. local-first: the nearest place that
    has it; cloud-only, for comparison: always the store of --checkpoint.cloud; none:
    the run ends instead, and keeps its plan when nodes come or leave."""
    reroute: bool = False
    """Let the replicas that are left take over the samples of a lost one at once, and
    go on while it is started again; losses are then the same to rounding."""
    standby_plans_after_s: float = 60.0
    """Seconds of training until plans for the loss of each node are made and compiled
    in the background, where workers are processes of their own; 0: never."""
    timeout_scale: float = 1.0
    """Multiplies all limits on waiting for a worker (30 minutes for a step), after
    which it counts as lost."""
    watchdog_factor: float = 10.0
    """How many times as long as they should steps, saves and restores may take (a
    minute at least) until a worker that is late has to say where it is, and is lost."""
    watch_speeds: Literal["auto", "on", "off"] = "auto"
    """Whether to time stages in every step, and to tell who becomes slow. auto: unless
    devices are simulated, which share the cores of a machine."""
    replan: Literal["say", "auto", "never"] = "say"
    """What to do where something is slow, or as before again, and another plan surely
    gains more than it costs to move to it. auto: move; never: look for no plan."""
    simulate: bool = False
    """Let CPU devices stand in for those of the cluster."""
    platform: Literal["auto", "cpu"] = "auto"
    """What to run on. auto: what JAX finds, but never the CPU of a machine whose GPU or
    TPU JAX does not use; cpu: the CPU, whatever else there is."""
    stop_after: int | None = None
    """Save and stop after this many steps of this start, as if preempted."""
    max_hours: float | None = None
    """Save and stop after this many hours of this start, as if preempted."""
    trace: bool = False
    """Write a timeline of a few steps as trace.json, to open in ui.perfetto.dev."""
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    join: JoinConfig = field(default_factory=JoinConfig)
