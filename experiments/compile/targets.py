# SPDX-License-Identifier: Apache-2.0
"""Describes the devices that programs are compiled for; none has to be here.

Owns the compilers' description of each kind of device. Sizes of GPUs are what CUDA
reports of the card (`cudaDeviceProp`), those of TPUs are the compiler's own. Does not
own what is compiled.
"""

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import jax
from jax.experimental import topologies

from hetjax.cluster import catalogue
from hetjax.cluster.catalogue import Backend, Compiler
from hetjax.cluster.cluster import Precision
from hetjax.plans.plan import AttentionForm

MOST_DEVICES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Tpu:
    """A TPU generation; `topology` is the smallest with `MOST_DEVICES` devices."""

    name: str
    topology: str
    dtype: Precision = "bfloat16"
    attention: AttentionForm = "splash"
    compiler: str = "libtpu"
    backend: Backend = "tpu"

    def devices(self) -> list[jax.Device]:
        """Return devices to compile for."""
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # asks no metadata server
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no device can be taken twice
        found = topologies.get_topology_desc(self.topology, platform="tpu")
        return found.devices[:MOST_DEVICES]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A card. `capability` is its compute capability; bytes and Hz are per card.

    `block_bytes` and `core_bytes` are the shared memory that a block may request and
    that a multiprocessor has.
    """

    name: str
    card: str
    capability: tuple[int, int]
    cores: int
    fp32_units: int
    bytes_per_s: int
    memory_bytes: int
    l2_bytes: int
    clock_ghz: float
    block_bytes: int
    core_bytes: int
    core_threads: int
    compiler: str = "jax-cuda12-plugin"
    backend: Backend = "gpu"

    @property
    def dtype(self) -> Precision:
        """The 16-bit format that its matrix units multiply best."""
        return "bfloat16" if self.capability >= (8, 0) else "float16"

    @property
    def attention(self) -> AttentionForm:
        """The form of attention that is best there."""
        return "cudnn" if self.capability >= (8, 0) else "chunked"

    def devices(self) -> list[jax.Device]:
        """Return devices to compile for: one host with `MOST_DEVICES` of the card."""
        found = topologies.get_topology_desc(
            self.card,
            platform="cuda",
            target_config=self.config(),
            topology=f"1x1x{MOST_DEVICES}",
        )
        return found.devices

    def config(self) -> str:
        """Return XLA's GpuTargetConfig of the card as text."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.core_bytes}
  threads_per_core_limit: {self.core_threads}
  core_count: {self.cores}
  fpus_per_core: {self.fp32_units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bytes_per_s}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {self.block_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{self.card}"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The CPU of this machine, which is not in `TARGETS`."""

    name: str = "cpu"
    dtype: Precision = "float32"
    attention: AttentionForm = "chunked"
    compiler: str = "jaxlib"
    backend: Backend = "cpu"

    def devices(self) -> list[jax.Device]:
        """Return devices to compile for."""
        return jax.local_devices(backend="cpu")


Target = Tpu | Gpu | Host

TARGETS: dict[str, Tpu | Gpu] = {
    target.name: target
    for target in (
        Gpu(
            name="V100",
            card="Tesla V100-SXM2-32GB",
            capability=(7, 0),
            cores=80,
            fp32_units=64,
            bytes_per_s=898_000_000_000,
            memory_bytes=33_822_867_456,
            l2_bytes=6_291_456,
            clock_ghz=1.53,
            block_bytes=98_304,
            core_bytes=98_304,
            core_threads=2048,
        ),
        Gpu(
            name="T4",
            card="Tesla T4",
            capability=(7, 5),
            cores=40,
            fp32_units=64,
            bytes_per_s=320_000_000_000,
            memory_bytes=15_642_329_088,
            l2_bytes=4_194_304,
            clock_ghz=1.59,
            block_bytes=65_536,
            core_bytes=65_536,
            core_threads=1024,
        ),
        Gpu(
            name="A100",
            card="NVIDIA A100-SXM4-80GB",
            capability=(8, 0),
            cores=108,
            fp32_units=64,
            bytes_per_s=2_039_000_000_000,
            memory_bytes=84_987_740_160,
            l2_bytes=41_943_040,
            clock_ghz=1.41,
            block_bytes=166_912,
            core_bytes=167_936,
            core_threads=2048,
        ),
        Gpu(
            name="RTX 3090",
            card="NVIDIA GeForce RTX 3090",
            capability=(8, 6),
            cores=82,
            fp32_units=128,
            bytes_per_s=936_000_000_000,
            memory_bytes=25_438_126_080,
            l2_bytes=6_291_456,
            clock_ghz=1.695,
            block_bytes=101_376,
            core_bytes=102_400,
            core_threads=1536,
        ),
        Gpu(
            name="RTX 4090",
            card="NVIDIA GeForce RTX 4090",
            capability=(8, 9),
            cores=128,
            fp32_units=128,
            bytes_per_s=1_008_000_000_000,
            memory_bytes=25_393_692_672,
            l2_bytes=75_497_472,
            clock_ghz=2.52,
            block_bytes=101_376,
            core_bytes=102_400,
            core_threads=1536,
        ),
        Gpu(
            name="L4",
            card="NVIDIA L4",
            capability=(8, 9),
            cores=58,
            fp32_units=128,
            bytes_per_s=300_000_000_000,
            memory_bytes=23_664_263_168,
            l2_bytes=50_331_648,
            clock_ghz=2.04,
            block_bytes=101_376,
            core_bytes=102_400,
            core_threads=1536,
        ),
        Gpu(
            name="H100",
            card="NVIDIA H100 80GB HBM3",
            capability=(9, 0),
            cores=132,
            fp32_units=128,
            bytes_per_s=3_352_000_000_000,
            memory_bytes=84_942_979_072,
            l2_bytes=52_428_800,
            clock_ghz=1.98,
            block_bytes=232_448,
            core_bytes=233_472,
            core_threads=2048,
        ),
        Gpu(
            name="B200",
            card="NVIDIA B200",
            capability=(10, 0),
            cores=148,
            fp32_units=128,
            bytes_per_s=8_000_000_000_000,
            memory_bytes=191_513_755_648,
            l2_bytes=132_644_864,
            clock_ghz=1.965,
            block_bytes=232_448,
            core_bytes=233_472,
            core_threads=2048,
        ),
        Tpu(name="v4", topology="v4:2x2x2"),
        Tpu(name="v5e", topology="v5e:2x4"),
        Tpu(name="v5p", topology="v5p:2x2x2"),
        Tpu(name="v6e", topology="v6e:2x4"),
    )
}


def installed(target: Target) -> str | None:
    """Return the version of the target's compiler; None if it is not installed."""
    try:
        return version(target.compiler)
    except PackageNotFoundError:
        return None


def compiler_of(target: str) -> Compiler:
    """Return the compiler, among those that our memory model distinguishes, for a
    target or for the CPU."""
    match TARGETS.get(target):
        case Tpu():
            return catalogue.compiler_of(f"TPU-{target}")
        case Gpu(capability=capability) if capability < (8, 0):
            return "GPU-before-Ampere"
        case _:
            return catalogue.compiler_of(target)
