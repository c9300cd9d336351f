# SPDX-License-Identifier: Apache-2.0
"""Tests stores on a real server that speaks S3: Ceph's gateway, on this machine.

    python -m experiments.stores.ceph FOLDER

Needs root and Debian's Ceph (`own_ceph.py`). Prints a line of JSON for each of these:

    answers   requests of the product: does the gateway answer as the fake of the tests?
    doctor    what `hetjax doctor` says of the bucket with its owner's login, a wrong
              secret, an unknown key, another user's key, and of a missing bucket
    lost      a run loses its directory and resumes from the bucket elsewhere: are all
              losses those of a run that was not stopped?
    two       a second run with the same place in the bucket: is it refused?
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from experiments.launchers.trial import losses, wait_for_step
from experiments.stores.own_ceph import BUCKET, add_user, own_ceph
from tests.checkpoint import test_fake_s3
from tests.checkpoint.fake_s3 import FakeS3

_HETJAX = (sys.executable, "-m", "hetjax")
_TEXT = "licence.txt"
_SMALL = ("--seq-len", "32", "--global-batch", "8", "--evaluation.sample-tokens", "0")


def main() -> None:
    """Run and report each of them."""
    parser = argparse.ArgumentParser(description="A store on Ceph.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True)
    text = Path(__file__).parents[2] / "LICENSE"
    (folder / _TEXT).write_bytes(text.read_bytes())
    with own_ceph(folder / "ceph") as url:
        report("version", said=output("radosgw", "--version"))
        answers(url)
        doctor(url)
        lost(folder, url)
        two(folder, url)


def report(name: str, **found: object) -> None:
    print(json.dumps({"what": name, **found}), flush=True)


def answers(url: str) -> None:
    """Run every test that compares the fake with another server on the gateway."""
    tests: dict[str, Callable[..., None]] = {
        name: test for name, test in vars(test_fake_s3).items() if name[:5] == "test_"
    }
    with FakeS3(BUCKET).serving() as fake:
        for name, test in tests.items():
            keys = ("plain", test_fake_s3.ODD) if "contents" in name else (None,)
            for key in keys:
                try:
                    test({"moto": url, "fake": fake.url}, *filter(None, [key]))
                    report("answers", test=name, key=key, alike=True)
                except AssertionError as error:
                    unlike = str(error)[:400]
                    report("answers", test=name, key=key, alike=False, unlike=unlike)


def doctor(url: str) -> None:
    """Report what `doctor` says of logins with and without access."""
    add_user("other", "AKIAOTHER", "the secret of somebody else")
    logins = {
        "owner": {},
        "wrong secret": {"AWS_SECRET_ACCESS_KEY": "guessed"},
        "unknown key": {"AWS_ACCESS_KEY_ID": "AKIANOBODY"},
        "somebody else": {
            "AWS_ACCESS_KEY_ID": "AKIAOTHER",
            "AWS_SECRET_ACCESS_KEY": "the secret of somebody else",
        },
    }
    for name, login in logins.items():
        looked(name, BUCKET, url, login)
    looked("no bucket", "nobodys", url, {})


def looked(name: str, bucket: str, url: str, login: dict[str, str]) -> None:
    words = ["doctor", "--cloud", f"s3://{bucket}/looked", "--endpoint", url, "--json"]
    done = hetjax(*words, **login)
    findings = json.loads(done.stdout)["findings"]
    store = next(found for found in findings if found["check"] == "store")
    report("doctor", login=name, code=done.returncode, **store)


def lost(folder: Path, url: str) -> None:
    """Run training that loses its directory, then resume it."""
    kept = ["--checkpoint.cloud", f"s3://{BUCKET}/lost", "--checkpoint.endpoint", url]
    train(folder / "whole", 8)
    stopped = train(folder / "first", 8, *kept, "--stop-after", "4")
    shutil.rmtree(folder / "first")
    gone_on = train(folder / "second", 8, *kept)
    whole, found = losses(folder / "whole"), losses(folder / "second")
    report(
        "lost",
        codes=[stopped.returncode, gone_on.returncode],
        fetched="fetched step 4" in gone_on.stdout,
        steps=[*found],
        alike=all(whole[step] == found[step] for step in found),
    )


def two(folder: Path, url: str) -> None:
    """Start a second run while the first one trains."""
    kept = ["--checkpoint.cloud", f"s3://{BUCKET}/two", "--checkpoint.endpoint", url]
    kept += ["--checkpoint.every", "5"]
    words = [*_HETJAX, *train_words(folder / "one", 10_000), *kept]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as one:
        try:
            wait_for_step(folder / "one", 1)
            second = train(folder / "other", 10_000, *kept)
        finally:
            one.kill()
    report("two", code=second.returncode, said=second.stderr.splitlines())


def train(run_dir: Path, steps: int, *options: str) -> subprocess.CompletedProcess[str]:
    return hetjax(*train_words(run_dir, steps), *options)


def train_words(run_dir: Path, steps: int) -> list[str]:
    words = ["train", "tiny", "--steps", str(steps), "--run-dir", str(run_dir)]
    return [*words, *_SMALL, "--data.path", str(run_dir.parent / _TEXT)]


def hetjax(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_HETJAX, *words],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def output(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
