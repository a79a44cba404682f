"""Two hosts, which are network namespaces, and the cable between them. As root alone."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import producers
import pytest
from network_group import Host, Two, two_hosts

from dtorch_ops import network

Hosts = tuple[Host, Host]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        made = two_hosts()
        both = made.__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces to be had: {error}")
    yield both
    made.__exit__(None, None, None)


@pytest.fixture
def two(hosts: Hosts) -> Iterator[Two]:
    made = Two(hosts)
    for each in (made.owner, made.worker):
        each.call(network.set_lost_after, 1.0)
    yield made
    made.close()


def take_the_link_down(hosts: Hosts) -> None:
    hosts[1].run("ip link set eth0 down")


def lose_all_packets(hosts: Hosts) -> None:
    """Of both directions, on their way out; nobody says that they do not arrive."""
    for host in hosts:
        host.run(f"ip route add blackhole {Host.address(1 - host.number)}/32")


@pytest.mark.parametrize("cut", [take_the_link_down, lose_all_packets])
def test_a_cable_is_cut(hosts: Hosts, two: Two, cut: object) -> None:
    """Both ends find out: the owner that no value comes, the worker that none goes."""
    two.held()
    cut(hosts)  # type: ignore[operator]
    said = two.owner.call(producers.error_of_made)
    assert said.startswith("BrokenPromiseError") and "'worker1' has given no sign for 1 s" in said
    said = two.worker.call(producers.error_of_setting_held)
    assert said.startswith("BrokenPromiseError") and "worker 'worker0'" in said


def test_a_cable_that_is_plugged_in_again(hosts: Hosts, two: Two) -> None:
    """What was held is broken; what is sent from then on arrives."""
    two.held()
    lose_all_packets(hosts)
    assert "has given no sign" in two.owner.call(producers.error_of_made)
    for host in hosts:
        host.run(f"ip route del blackhole {Host.address(1 - host.number)}/32")
    two.worker.call(producers.release)
    limit = time.monotonic() + 60
    while True:  # what was lost in the meantime is sent again now and then, by TCP
        try:
            two.held()
            break
        except AssertionError as error:
            assert "BrokenPromiseError" in str(error) and time.monotonic() < limit, error
    assert two.worker.call(producers.set_held_full, (3,)) == "none"
    assert two.owner.call(producers.sum_of_made) == 3.0


def test_a_slow_line_is_not_a_lost_one(hosts: Hosts, two: Two) -> None:
    """3 s for one value, behind which every sign waits that goes the same way."""
    two.held()
    hosts[1].run("tc qdisc add dev eth0 root tbf rate 20mbit burst 64kb latency 500ms")
    assert two.worker.call(producers.set_held_full, (2_000_000,)) == "none"
    assert two.owner.call(producers.sum_of_made) == 2_000_000.0
