# SPDX-License-Identifier: Apache-2.0
"""Checks which settings of a run are allowed, each by itself and beside the others.

Does not own the settings (`config.py`).
"""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from hetjax.checkpoint.stores.endpoint import S3, bucket_problems, endpoint_problems
from hetjax.cluster import ranges
from hetjax.cluster.ranges import Range
from hetjax.comm.addresses import address_problems
from hetjax.errors import BadInput
from hetjax.launchers.table import (
    LAUNCHERS,
    LOCAL_PROCESSES,
    with_own_disks,
    with_worker_processes,
)
from hetjax.models.finetuning import check_finetuning
from hetjax.optimizers.checks import optimizer_problems
from hetjax.training.settings.config import RunConfig

_MOST_STEPS = 10**9  # a schedule counts them in 32 bits
_UPLOAD = Range(1e-3, 1e9)
_RANGES = {
    "steps": Range(1, _MOST_STEPS),
    "seq_len": ranges.TOKENS,
    "global_batch": ranges.SEQUENCES,
    "microbatch_size": ranges.SEQUENCES,
    "optimizer.warmup_steps": Range(0, _MOST_STEPS),
    "optimizer.weight_decay": Range(0, 1e6),
    "evaluation.every": Range(0, _MOST_STEPS),
    "evaluation.num_batches": Range(1, 10**6),
    "evaluation.sample_tokens": Range(0, 10**6),
    "checkpoint.every": Range(0, _MOST_STEPS),
    "checkpoint.keep": Range(1, 10**6),
    "checkpoint.copies": ranges.COUNT,
    "standby_plans_after_s": Range(0, 1e9),
    "loss_scale_growth_interval": Range(1, _MOST_STEPS),
    "spike_factor": Range(1, 1e9),
    "spike_window": Range(2, 10_000),
    "digest_every": Range(0, _MOST_STEPS),
    "timeout_scale": Range(0.01, 1e4),
    "watchdog_factor": Range(1, 1e6),
    "stop_after": Range(1, _MOST_STEPS),
    "max_hours": Range(1e-4, 1e6),
    "join.wait_s": Range(1, 1e6),
    "join.token_s": Range(1, 1e6),
}
_LIMITS: dict[str, tuple[Callable[[float], bool], str, str]] = {  # rule, text, example
    "optimizer.learning_rate": (lambda x: 0 < x <= 1e6, "0 < {} <= 1e+06", "3e-4"),
    "optimizer.clip_norm": (lambda x: x >= 1e-9, "{} >= 1e-09, inf too", "1.0"),
    "evaluation.temperature": (
        lambda x: not x or 1e-6 <= x <= 1e6,
        "0, or 1e-06 <= {} <= 1e+06",
        "0.8",
    ),
    "optimizer.final_fraction": (lambda x: 0 <= x <= 1, "0 <= {} <= 1", "0.1"),
    "loss_scale_init": (
        lambda x: 1 <= x <= 2**24 and math.log2(x).is_integer(),
        "{} = 2**n, n from 0 to 24",
        "256",
    ),
    "seed": (lambda x: 0 <= x < 2**32, "0 <= {} < 2**32", "0"),
}


def check_config(config: RunConfig) -> None:
    """Raise BadInput for the first setting that is not allowed."""
    for problem in _problems(config):
        raise problem
    check_finetuning(config.train, config.lora)


def option(name: str) -> str:
    """Return the command-line spelling of a setting, e.g. --optimizer.learning-rate."""
    return f"--{name.replace('_', '-')}"


def as_options(settings: Mapping[str, Any]) -> str:
    """Return settings by name, as they are typed in a shell.

    >>> as_options({"init": None, "evaluation.prompt": "Once upon"})
    "--init None --evaluation.prompt 'Once upon'"
    """
    return " ".join(_typed(name, value) for name, value in settings.items())


def _typed(name: str, value: object) -> str:
    words = value if isinstance(value, list | tuple) else [value]
    typed = shlex.join(map(str, words))
    # a word that starts with a dash would be read as an option
    return f"{option(name)}{'=' if str(value).startswith('-') else ' '}{typed}"


def _problems(config: RunConfig) -> Iterator[BadInput]:
    for name, range_ in _RANGES.items():
        value = attrgetter(name)(config)
        if value is not None and not range_.has(value):
            yield _out_of_range(config, name, range_.allowed(name), f"{range_.least:g}")
    for name, (is_allowed, allowed, example) in _LIMITS.items():
        if not is_allowed(attrgetter(name)(config)):
            yield _out_of_range(config, name, allowed.format(name), example)
    yield from _prompt_problems(config.evaluation.prompt)
    yield from optimizer_problems(config.optimizer)
    for of in (
        _profile_problems,
        _offload_problems,
        _upload_problems,
        _store_problems,
        _copies_problems,
        _recovery_problems,
        _reroute_problems,
        _hosts_problems,
        _join_problems,
    ):
        yield from of(config)
    yield from _tls_problems(config)


def _hosts_problems(config: RunConfig) -> Iterator[BadInput]:
    """Yield problems of --hosts: some launchers need it, others have no use for it."""
    readers = " or ".join(n for n, row in LAUNCHERS.items() if row.reads_hosts)
    if LAUNCHERS[config.launcher].reads_hosts and config.hosts is None:
        yield BadInput(
            got=f"--launcher {config.launcher} without --hosts",
            allowed="a file that names the machines and how to reach them",
            fix="hetjax launch ssh HOSTS.toml -- train PRESET ..., or add --hosts FILE",
        )
    if not LAUNCHERS[config.launcher].reads_hosts and config.hosts is not None:
        yield BadInput(
            got=f"--hosts with --launcher {config.launcher}",
            allowed=f"--hosts with --launcher {readers}",
            fix=f"add --launcher {readers}, or leave --hosts out",
        )


def _join_problems(config: RunConfig) -> Iterator[BadInput]:
    """Yield problems of --join.address, which only launcher join needs and takes."""
    waits = LAUNCHERS[config.launcher].waits_for_joins
    if waits and config.join.address is None:
        yield BadInput(
            got=f"--launcher {config.launcher} without --join.address",
            allowed="the address at which machines reach this one",
            fix="add --join.address HOST:PORT, such as 10.0.0.1:7411; ip address lists "
            "those of this machine",
        )
    if not waits and config.join.address is not None:
        yield BadInput(
            got=f"--join.address with --launcher {config.launcher}",
            allowed="--join.address with --launcher join",
            fix="add --launcher join, or leave --join.address out",
        )
    if waits and config.join.address is not None:
        yield from address_problems("--join.address", config.join.address, least=0)


def _recovery_problems(config: RunConfig) -> Iterator[BadInput]:
    """Yield problems of cloud-only: it needs a store, and workers that may be lost."""
    if config.recovery != "cloud-only":
        return
    if not LAUNCHERS[config.launcher].has_worker_processes:
        yield BadInput(
            got="--recovery cloud-only without workers that could be lost",
            allowed=f"cloud-only with --launcher {with_worker_processes()}",
            fix=f"add --launcher {LOCAL_PROCESSES}, or leave --recovery out",
        )
    if config.checkpoint.cloud is None:
        yield BadInput(
            got="--recovery cloud-only without a store",
            allowed="cloud-only with --checkpoint.cloud",
            fix="add --checkpoint.cloud gs://BUCKET/PREFIX, or leave --recovery out",
        )


def _reroute_problems(config: RunConfig) -> Iterator[BadInput]:
    """Yield problems of --reroute, which needs other workers that have the state."""
    if config.reroute and not LAUNCHERS[config.launcher].has_worker_processes:
        yield BadInput(
            got="--reroute without workers that could be lost",
            allowed=f"--reroute with --launcher {with_worker_processes()}",
            fix=f"add --launcher {LOCAL_PROCESSES}, or leave --reroute out",
        )
    if config.reroute and config.recovery != "local-first":
        yield BadInput(
            got=f"--reroute with --recovery {config.recovery}",
            allowed="--reroute with --recovery local-first, the default",
            fix="leave out one of the two",
        )


def _copies_problems(config: RunConfig) -> Iterator[BadInput]:
    """Yield problems of copies, which need disks other than a worker's own."""
    copies, local = config.checkpoint.copies or 1, config.checkpoint.local
    launcher = LAUNCHERS[config.launcher]
    one_disk = launcher.shares_disk and "{worker}" not in str(local)
    if copies > 1 and (one_disk or not launcher.has_worker_processes):
        yield BadInput(
            got=f"--checkpoint.copies {copies}, but all in one folder of this machine",
            allowed="copies on the disks of several nodes: with --launcher "
            f"{with_own_disks()}, or with a folder for each worker",
            fix="add --launcher processes --checkpoint.local '/disk/{worker}', or "
            "leave --checkpoint.copies out",
        )


def _tls_problems(config: RunConfig) -> Iterator[BadInput]:
    """Yield problems of TLS, which needs all its files or none."""
    names = ("cert", "key", "ca")
    missing = [name for name in names if getattr(config.tls, name) is None]
    if 0 < len(missing) < len(names):
        yield BadInput(
            got=f"TLS without --tls.{missing[0]}",
            allowed="--tls.cert, --tls.key and --tls.ca, or none of them",
            fix=f"add --tls.{missing[0]} FILE.pem",
        )
    if not missing and config.transport == "transfer":
        yield BadInput(
            got="--tls.cert with --transport transfer, which is not encrypted",
            allowed="TLS with --transport sockets",
            fix="leave --transport out",
        )


def _upload_problems(config: RunConfig) -> Iterator[BadInput]:
    name, limit = "checkpoint.upload_mbit_per_s", config.checkpoint.upload_mbit_per_s
    if limit is None:
        return
    if config.checkpoint.cloud is None:
        yield BadInput(
            got=f"{option(name)} {limit:g} without a store",
            allowed=f"{option(name)} with {option('checkpoint.cloud')}",
            fix=f"leave it out, or add {option('checkpoint.cloud')} gs://BUCKET/PREFIX",
        )
    if not _UPLOAD.has(limit):
        yield _out_of_range(config, name, _UPLOAD.allowed(name), "100")


def _store_problems(config: RunConfig) -> Iterator[BadInput]:
    """Yield problems of the store's URL before it is written into the run's files."""
    cloud, endpoint = config.checkpoint.cloud, config.checkpoint.endpoint
    yield from endpoint_problems(cloud, endpoint)
    if cloud is not None and cloud.startswith(S3):
        yield from bucket_problems(cloud)


def _profile_problems(config: RunConfig) -> Iterator[BadInput]:
    """Yield problems of a profile that would not be read."""
    elsewhere = {"plan": config.plan, "planner": config.planner}
    for name, value in elsewhere.items():
        if config.profile is not None and value not in (None, "hetjax"):
            yield BadInput(
                got=f"{option('profile')} {config.profile} with {option(name)} {value}",
                allowed="measured times for planner hetjax, which makes its own plan",
                fix=f"leave {option('profile')} or {option(name)} out",
            )


def _offload_problems(config: RunConfig) -> Iterator[BadInput]:
    """Yield problems of an offload choice that would have no effect."""
    is_even = config.planner == "even" and config.offload == "auto"
    if config.offload != "none" and (config.plan is not None or is_even):
        with_ = f"plan {config.plan}" if config.plan is not None else "planner even"
        yield BadInput(
            got=f"--offload {config.offload} with --{with_}",
            allowed="--offload if the plan is made here (auto: by planner hetjax); a "
            "plan file sets it stage by stage",
            fix='leave --offload out, or write "offload": "optimizer" into stages of '
            "the plan file",
        )


def _prompt_problems(prompt: str) -> Iterator[BadInput]:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        yield BadInput(
            got=f"evaluation.prompt = {prompt!r}",
            allowed="text that UTF-8 can encode",
            fix="give --evaluation.prompt in UTF-8",
        )


def _out_of_range(config: RunConfig, name: str, allowed: str, example: str) -> BadInput:
    return BadInput(
        got=f"{name} = {attrgetter(name)(config)}",
        allowed=allowed,
        fix=f"give {option(name)} {example}, say",
    )
