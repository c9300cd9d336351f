# SPDX-License-Identifier: Apache-2.0
"""Measures a model's layers on the machine's devices, case by case, into one file.

Owns the list of cases, the reuse of an existing profile, and the progress that users
see. Does not own how a layer is timed (`layer_bench.py`), the file
(`costs/measured/layer_profile.py`), the settings (`config.py`) nor the table
(`report/measured.py`).
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import permutations, product
from statistics import median

import jax
import optax

from hetjax.cluster.catalogue import Precision, canonical_name
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.discovery import device_name
from hetjax.costs.measured.layer_profile import (
    LinkMeasurement,
    Measurement,
    Profile,
    read_profile,
    write_profile,
)
from hetjax.errors import BadInput, counted_noun
from hetjax.models.attention.attention import head_sizes
from hetjax.models.model import Model, tensor_sizes
from hetjax.plans.attention import EVERYWHERE, Heads, node_attention
from hetjax.plans.plan import AttentionForm
from hetjax.plans.precision import node_precision
from hetjax.profiling.config import ProfileConfig, check_output
from hetjax.profiling.layer_bench import (
    NUM_REPETITIONS,
    Case,
    LayerBench,
    Times,
    layer_kinds,
    measure_link,
    program_seconds,
)
from hetjax.report.measured import TIMES, MeasuredProfile
from hetjax.report.progress import Display, display

Devices = Mapping[str, Sequence[jax.Device]]  # by node
_Pair = tuple[str, str]  # node names: from, to
_MOST_SEQUENCES = 2**16  # more than any device holds


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """The inputs of measuring; `cases` and `pairs` are those that the file lacks."""

    config: ProfileConfig
    model: Model
    optimizer: optax.GradientTransformation
    devices: Devices
    cases: tuple[Case, ...]
    pairs: tuple[_Pair, ...]


def measure_profile(
    config: ProfileConfig,
    model: Model,
    cluster: Cluster,
    devices: Devices,
    optimizer: optax.GradientTransformation,
    *,
    quiet: bool = False,
) -> Profile:
    """Measure what the output file lacks; write the file after every case.

    `devices` are the local ones, by node name; `optimizer` is used in the updates.
    Progress goes to standard output, to standard error if `quiet`. Raises BadInput if
    something cannot be measured, before anything is.
    """
    precision, kinds = _precision(config, cluster), layer_kinds(model)
    config = replace(config, dtype=precision)
    wanted = Profile(
        model=model.name,
        seq_len=config.seq_len,
        dtype=precision,
        layers=kinds,
        measurements=(),
    )
    kept = kept_profile(config, wanted)
    nodes = _node_of_kind(cluster)
    _check_tensor(config, nodes)
    cases = list(_cases(config, kinds, nodes))
    there = {_case(m) for m in kept.measurements if m.input_gradient_s is not None}
    if not config.halves:
        there |= {_case(m) for m in kept.measurements}
    linked = {link.between for link in kept.links}
    names = [node.name for node in cluster.nodes]
    job = _Job(
        config=config,
        model=model,
        optimizer=optimizer,
        devices=devices,
        cases=tuple(case for case in cases if case not in there),
        pairs=tuple(p for p in permutations(names, 2) if p not in linked),  # both ways
    )
    num = len(job.cases) + len(job.pairs)
    with redirect_stdout(sys.stderr if quiet else sys.stdout), display(num) as shown:
        _announce(job, kept, nodes, shown)
        shown.doing("the first measurement")
        profile = _measured(job, kept, nodes, shown)
        shown.note(str(MeasuredProfile(profile=profile, path=config.output)))
        shown.note(f"profile written to {config.output}")
    return profile


def _precision(config: ProfileConfig, cluster: Cluster) -> Precision:
    """Return the precision to measure in. Raises BadInput if the devices' differ."""
    found: set[Precision] = {
        node_precision(node, config.dtype) for node in cluster.nodes
    }
    if len(found) > 1:
        raise BadInput(
            got=f"--dtype {config.dtype} on devices that compute best in "
            f"{' and in '.join(sorted(found))}",
            allowed="a profile in one precision",
            fix="give --dtype float32, say, or --cluster and --output for each kind",
        )
    return found.pop()


def _measured(
    job: _Job, profile: Profile, nodes: dict[str, Node], shown: Display
) -> Profile:
    """Measure case by case; write the file after each."""
    output, done = job.config.output, 0
    if not profile.measurements and job.cases:
        firsts = [job.devices[node.name][0] for node in nodes.values()]
        program_s = median(map(program_seconds, firsts))
        profile = replace(profile, program_s=program_s)
    same: dict[tuple[str, Case], Measurement | None] = {}
    shared: dict[tuple[str, str, int], float | None] = {}
    for case in job.cases:
        devices = job.devices[nodes[case.device].name]
        # simulated kinds that have the same stand-in device are measured once
        here = device_name(devices[0]), replace(case, device="")
        if here not in same:
            same[here] = _measure(case, job, devices, profile.program_s, shown)
        measurement = same[here]
        done += 1
        if measurement is not None:
            # updates do not depend on microbatches or remat
            key = device_name(devices[0]), case.kind, case.tensor
            if key not in shared:
                shared[key] = _shared_update_s(case, job, devices, profile.program_s)
            own = replace(measurement, device=case.device, shared_update_s=shared[key])
            others = [m for m in profile.measurements if _case(m) != case]
            profile = replace(profile, measurements=(*others, own))
            write_profile(output, profile)
        shown.trained({"step": done})
    for pair in job.pairs:
        profile = replace(profile, links=(*profile.links, _link(pair, job, shown)))
        write_profile(output, profile)
        done += 1
        shown.trained({"step": done})
    return profile


def _measure(
    case: Case,
    job: _Job,
    devices: Sequence[jax.Device],
    program_s: float,
    shown: Display,
) -> Measurement | None:
    """Measure one case; show a note and return None if memory is too small."""
    name = (
        f"{case.kind} on {case.device}, tensor {case.tensor}, "
        f"{case.microbatch_size} sequences, remat {case.remat}"
    )
    timed = _timed(case, job, devices)
    if timed is None:
        shown.note(f"{name}: left out, the device's memory is too small")
        return None
    bench, times = timed
    m = bench.measurement(times, program_s)
    named_times = zip(TIMES, (m.forward_s, m.backward_s, m.update_s), strict=True)
    shown.note(f"{name}: " + ", ".join(f"{w} {1e3 * s:.3f} ms" for w, s in named_times))
    return m


def _shared_update_s(
    case: Case, job: _Job, devices: Sequence[jax.Device], program_s: float
) -> float | None:
    """Time the update of a layer in two replicas; None if memory is too small."""
    timed = _timed(case, job, devices, num_replicas=2)
    return None if timed is None else timed[0].update_s(timed[1], program_s)


def _timed(
    case: Case, job: _Job, devices: Sequence[jax.Device], num_replicas: int = 1
) -> tuple[LayerBench, list[Times]] | None:
    """Time the case `NUM_REPETITIONS` times; None if memory is too small."""
    try:
        bench = LayerBench(
            case,
            job.model,
            devices,
            job.optimizer,
            seq_len=job.config.seq_len,
            dtype=job.config.dtype,
            attention=_attention(case, job, devices[0].platform),
            halves=job.config.halves,
            num_replicas=num_replicas,
        )
        return bench, [bench.time_once() for _ in range(NUM_REPETITIONS)]
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return None
        raise


def _attention(case: Case, job: _Job, platform: str) -> AttentionForm:
    """Return the device's default form in runs; stand-in CPUs have no kernels."""
    if platform == "cpu":
        return EVERYWHERE
    heads = Heads(seq_len=job.config.seq_len, head_sizes=head_sizes(job.model))
    node = Node(name="measured", device=case.device, count=1)
    return node_attention(node, node_precision(node, job.config.dtype), heads)


def _link(pair: _Pair, job: _Job, shown: Display) -> LinkMeasurement:
    source, target = pair
    link = measure_link(job.devices[source][0], job.devices[target][0], pair)
    shown.note(
        f"link from {source} to {target}: {link.bandwidth_gbit_per_s:.3g} Gbit/s"
    )
    return link


def _node_of_kind(cluster: Cluster) -> dict[str, Node]:
    """Return the largest node of each device kind."""
    nodes: dict[str, Node] = {}
    for node in cluster.nodes:
        kind = canonical_name(node.device)
        if kind not in nodes or node.count > nodes[kind].count:
            nodes[kind] = node
    return nodes


def _cases(
    config: ProfileConfig, kinds: Sequence[str], nodes: dict[str, Node]
) -> Iterator[Case]:
    sizes = dict.fromkeys(config.microbatch_sizes)
    ways = list(product(dict.fromkeys(config.tensor), dict.fromkeys(config.remat)))
    for device, kind in product(nodes, dict.fromkeys(kinds)):
        for (tensor, remat), size in product(ways, sizes):
            if tensor <= nodes[device].count:
                yield Case(
                    device=device,
                    kind=kind,
                    tensor=tensor,
                    microbatch_size=size,
                    remat=remat,
                )


def _case(m: Measurement) -> Case:
    return Case(
        device=canonical_name(m.device),
        kind=m.kind,
        tensor=m.tensor,
        microbatch_size=m.microbatch_size,
        remat=m.remat,
    )


def kept_profile(config: ProfileConfig, wanted: Profile) -> Profile:
    """Return the profile in the output file, or `wanted` if there is no file.

    Raises BadInput if the file's model, sequence length, dtype or layers differ.
    """
    if not os.path.exists(config.output):
        return wanted
    found = read_profile(config.output)
    for key in ("model", "seq_len", "dtype", "layers"):
        there, asked = getattr(found, key), getattr(wanted, key)
        if there != asked:
            raise BadInput(
                got=f"profile file {str(config.output)!r} with {key} = {there!r}, "
                f"but {asked!r} is to be measured",
                allowed="a new file, or a profile of the same model, sequence length "
                "and dtype to add to",
                fix="give another --output, or remove the file",
            )
    return found


def check_choices(config: ProfileConfig, model: Model) -> None:
    """Raise BadInput for choices that cannot be measured or written anywhere."""
    if not 1 <= config.seq_len <= model.max_seq_len:
        raise BadInput(
            got=f"seq_len = {config.seq_len}",
            allowed=f"1 <= seq_len <= {model.max_seq_len}, the model's max_seq_len",
            fix=f"give --seq-len {model.max_seq_len} or less",
        )
    for name in ("microbatch_sizes", "tensor"):
        for value in getattr(config, name):
            if not 1 <= value <= _MOST_SEQUENCES:
                raise BadInput(
                    got=f"{name} with {value}",
                    allowed=f"{name} from 1 to {_MOST_SEQUENCES}",
                    fix=f"give --{name.replace('_', '-')} 1,2, say",
                )
    for axis, sizes in tensor_sizes(model).items():
        for tensor, size in product(config.tensor, sizes):
            if size % tensor:
                raise BadInput(
                    got=f"tensor = {tensor} with {size} {axis}",
                    allowed=f"a tensor degree that divides {size}",
                    fix="give --tensor 1, say",
                )
    check_output(config)


def _check_tensor(config: ProfileConfig, nodes: dict[str, Node]) -> None:
    most = max(node.count for node in nodes.values())
    if min(config.tensor) > most:
        raise BadInput(
            got=f"tensor = {min(config.tensor)} with {counted_noun(most, 'device')} in "
            "a node",
            allowed=f"a tensor degree of {most} or less",
            fix="give --tensor 1, or a --cluster with larger nodes",
        )


def _announce(job: _Job, kept: Profile, nodes: dict[str, Node], shown: Display) -> None:
    if kept.measurements:
        shown.note(
            f"{job.config.output}: {len(kept.measurements)} measurements are kept, "
            f"{len(job.cases)} are missing"
        )
    here = job.devices
    for device, node in nodes.items():
        if device != "cpu" and here[node.name][0].platform == "cpu":
            shown.note(f"{device} is simulated: its times are those of this CPU")
        for tensor in job.config.tensor:
            if tensor > node.count:
                shown.note(
                    f"{device}: tensor {tensor} left out, node {node.name!r} has "
                    f"{counted_noun(node.count, 'device')}"
                )
