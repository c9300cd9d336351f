# SPDX-License-Identifier: Apache-2.0
"""What a part of `first_light` may be told."""

import argparse
from dataclasses import replace
from typing import get_args

from hetjax.models.configs import DecoderConfig
from hetjax.models.presets import model_config
from hetjax.plans.attention import Attention
from hetjax.plans.plan import Remat
from hetjax.plans.precision import Dtype


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--seq-len", type=int, help="fewer than the model's positions")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=1)
    parser.add_argument("--remat", default="selective", choices=get_args(Remat))
    parser.add_argument("--dtype", default="best", choices=get_args(Dtype))
    parser.add_argument("--attention", default="best", choices=get_args(Attention))
    parser.add_argument("--matrix-size", type=int, default=8192)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)


def config_of(arguments: argparse.Namespace) -> DecoderConfig:
    """The model's sizes, with as many positions as were asked for."""
    config = model_config(arguments.model)
    return replace(config, max_seq_len=arguments.seq_len or config.max_seq_len)
