# SPDX-License-Identifier: Apache-2.0
"""Runs a command among unequal hosts on this machine, then removes them.

    python -m experiments.testbed --host a100:80:1000 --host v100:40:100 -- COMMAND...
    python -m experiments.testbed --host a100:80:1000 --host v100:40:100 --ray -- ...
    python -m experiments.testbed --host a100:80:1000 --host v100:40:100 --self-test

A host is NAME[:CPU_PERCENT[:MBIT_PER_S]]: percent of one core, and the rate at which it
sends. Values that are left out are unlimited. A quota is a limit and no promise: the
sum should leave 10 to 20 % of the machine idle. COMMAND runs on the machine itself,
with --ray on the first host (outside its quota), and finds in its environment

    HETJAX_TESTBED_CONTROLLER_ADDRESS  the machine's address towards the hosts
    HETJAX_TESTBED_ADDRESSES           JSON, {host: address}
    HETJAX_TESTBED_PREFIXES            JSON, {host: words before a command to run there}

and with --ray what `ray.init()` needs to join; a host's node has the resource
`hetjax_node_NAME`. The exit code is that of COMMAND. --self-test prints as JSON how
long a busy loop takes on each host and the rate of a plain socket between neighbours.
Needs root; --quota-less runs all on 127.0.0.1 at full speed instead.
"""

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack

from experiments.testbed import processes
from experiments.testbed.hosts import Host, Testbed
from experiments.testbed.measured import self_test
from experiments.testbed.ray_nodes import ray_nodes
from hetjax.errors import BadInput


def host_of(text: str) -> Host:
    """Read NAME[:CPU_PERCENT[:MBIT_PER_S]]."""
    name, *limits = text.split(":")
    try:
        numbers = [float(word) if word else None for word in limits]
    except ValueError:
        numbers = None
    if numbers is None or len(numbers) > 2:
        raise BadInput(
            got=f"--host {text}",
            allowed="NAME, NAME:CPU_PERCENT or NAME:CPU_PERCENT:MBIT_PER_S in numbers",
            fix="--host a100:80:1000, or --host a100::1000 without a CPU quota",
        )
    percent, mbit = [*numbers, None, None][:2]
    return Host(name=name, cpu_percent=percent, egress_mbit_per_s=mbit)


def variables(testbed: Testbed) -> dict[str, str]:
    """Return the variables that a command finds in its environment."""
    names = [host.name for host in testbed.hosts]
    return {
        "HETJAX_TESTBED_CONTROLLER_ADDRESS": testbed.controller_address,
        "HETJAX_TESTBED_ADDRESSES": json.dumps({n: testbed.address(n) for n in names}),
        "HETJAX_TESTBED_PREFIXES": json.dumps({n: testbed.prefix(n) for n in names}),
    }


def run_command(words: list[str], environment: dict[str, str]) -> int:
    """Run a command to its end; nothing of its process group outlives this."""
    with ExitStack() as stack:
        with processes.undisturbed():
            process = _start(words, environment)
            stack.callback(_end, process)
        code = process.wait()
    return code if code >= 0 else 128 - code


def _start(words: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            words, env=os.environ | environment, start_new_session=True
        )
    except OSError as error:
        raise BadInput(
            got=f"the command {words[0]!r}: {error.strerror}",
            allowed="a command on the PATH, or the path of one",
            fix="give it after --, as in -- python -m hetjax.train tiny",
        ) from error


def _end(process: "subprocess.Popen[bytes]") -> None:
    with processes.undisturbed():
        processes.end_group(process.pid)
        process.wait()


def run(arguments: argparse.Namespace) -> int:
    hosts = [host_of(text) for text in arguments.host]
    with ExitStack() as stack:
        testbed = Testbed(hosts, quota_less=arguments.quota_less)
        stack.enter_context(testbed)
        if arguments.self_test:
            print(json.dumps(self_test(testbed), indent=1))
            return 0
        words, environment = arguments.command, variables(testbed)
        if arguments.ray:
            environment |= stack.enter_context(ray_nodes(testbed)).environment
            words = [*testbed.network_prefix(hosts[0].name), *words]
        return run_command(words, environment)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.testbed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", action="append", required=True)
    parser.add_argument("--ray", action="store_true", help="a Ray node on each host")
    parser.add_argument("--quota-less", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("command", nargs="*", help="what to run, after --")
    arguments = parser.parse_args()
    if arguments.self_test == bool(arguments.command):
        parser.error("give either a COMMAND after -- or --self-test")
    try:
        return run(arguments)
    except BadInput as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
