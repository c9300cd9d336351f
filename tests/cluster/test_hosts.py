# SPDX-License-Identifier: Apache-2.0
"""Host files: what they hold, and what ssh must never receive."""

from pathlib import Path

import pytest

from hetjax.cluster.hosts import Host, load_hosts, parse_hosts
from hetjax.errors import BadInput

WHOLE = """
controller = "10.0.0.1"
[[host]]
name = "big"
address = "gpu-1"
user = "me"
port = 2222
python = "/opt/my env/bin/python"
directory = "/srv/it's here"
peers = "10.0.0.2"
[[host]]
name = "small"
address = "fe80::1%eth0"
"""


def test_a_file_says_how_each_host_is_reached():
    found = parse_hosts(WHOLE)
    assert found.controller == "10.0.0.1"
    assert found.hosts == (
        Host(
            name="big",
            address="gpu-1",
            user="me",
            port=2222,
            python="/opt/my env/bin/python",
            directory="/srv/it's here",
            peers="10.0.0.2",
        ),
        Host(name="small", address="fe80::1%eth0"),
    )
    assert [host.peer_address for host in found.hosts] == ["10.0.0.2", "fe80::1%eth0"]


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "no key 'host'"),
        ("host = []", "0 hosts"),
        ("[[host]]\nname = 'a'", "no key 'address'"),
        ("[[host]]\nname = 'a'\naddress = 'a'\nuesr = 'me'", "host[0].uesr"),
        ("hosts = 1\n[[host]]\nname = 'a'\naddress = 'a'", "hosts"),
        ("[[host]]\nname = 'a/0'\naddress = 'a'", "'a/0'"),
        ("[[host]]\nname = 'a'\naddress = 'a'\n" * 2, "2 hosts named 'a'"),
        # what ssh would read as an option, as a user, or as two words
        ("[[host]]\nname = 'a'\naddress = '-oProxyCommand=x'", "-oProxyCommand=x"),
        ("[[host]]\nname = 'a'\naddress = 'me@a'", "me@a"),
        ("[[host]]\nname = 'a'\naddress = 'a b'", "a b"),
        ("[[host]]\nname = 'a'\naddress = ''", "address = ''"),
        ("[[host]]\nname = 'a'\naddress = 'a'\nuser = '-l'", "user = '-l'"),
        ("[[host]]\nname = 'a'\naddress = 'a'\nport = 65536", "port = 65536"),
        ("[[host]]\nname = 'a'\naddress = 'a'\nport = '22'", "host[0].port"),
        ('[[host]]\nname = "a"\naddress = "a"\npython = "x\\ny"', "python ="),
        ("controller = 'a b'\n[[host]]\nname = 'a'\naddress = 'a'", "controller ="),
        ("[[host]", "TOML"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(text: str, got: str, tmp_path: Path):
    file = tmp_path / "hosts.toml"
    file.write_text(text)
    with pytest.raises(BadInput) as told:
        load_hosts(file)
    assert got in told.value.got and str(file) in told.value.got
    assert told.value.allowed and told.value.fix
