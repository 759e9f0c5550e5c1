"""The parts that a comparison over slow links stands on."""

import os
import socket
import threading

import numpy as np
import pytest
from benchmarks.links import quality
from benchmarks.links.hosts import ADDRESSES, two_hosts
from benchmarks.links.measure import fewest_reported, whole_periods
from benchmarks.links.quality import Curve, smooth
from benchmarks.links.samples import markov_text
from benchmarks.links.sides import CODECS, StepRow, has_staleness


def namespace():
    return os.stat("/proc/thread-self/ns/net").st_ino


def test_a_mean_is_taken_over_as_many_samples_whatever_a_row_holds():
    small = [(t, float(t), 10) for t in range(6)]
    large = [(t, float(t), 30) for t in range(3)]
    assert list(smooth(small, 30)) == [(2, 1.0), (3, 2.0), (4, 3.0), (5, 4.0)]
    assert list(smooth(large, 30)) == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert list(smooth(small, 1000)) == []


def falling(final, slope):
    losses = [(step, 3.0 - slope * step, 4) for step in range(1, 101)]
    return Curve(4, losses, final)


def test_who_does_not_reach_the_loss_with_every_seed_has_no_steps_to_it():
    curves = {"none": [falling(1.0, 0.02), falling(1.2, 0.02)], "slow": [falling(1.1, 0.02), falling(1.5, 0.001)]}
    goal = quality.goal(curves, steps=90)
    assert goal.steps == {"none": 60, "slow": None}
    rows = {row["codec"]: row for row in quality.rows(curves, goal)}
    assert rows["none"]["within"] == "yes"
    assert rows["slow"]["within"] == "no"


def test_a_kept_curve_is_as_good():
    curve = falling(1.5, 0.02)
    again = Curve.from_plain(4, curve.plain())
    assert again.final == 1.5
    assert abs(quality.steps_to([again], 2.0) - quality.steps_to([curve], 2.0)) <= quality.TOGETHER
    assert again.plain() == curve.plain()


def test_whole_periods_are_counted_with_their_agreement():
    """What a worker tells by itself at the last step of a period comes before all have agreed."""
    inner = [StepRow(t=float(i), samples=1, step=i, inner=True) for i in range(1, 13)]
    rows = sorted([*inner, *(StepRow(t=i + 0.5, samples=0, step=i) for i in (4, 8, 12))], key=lambda row: row.t)
    found = whole_periods(rows, 2.0, 4)
    assert (found[0].t, found[-1].t) == (4.5, 12.5)
    assert sum(row.samples for row in found[1:]) == 8
    assert whole_periods(rows[:11], 2.0, 4)[-1].t == 8.5, "the third has not been agreed on yet"
    assert [row.t for row in whole_periods(rows[:6], 2.0, 4, first=True)] == [3.0, 4.0, 4.5]


def test_who_has_no_lanes_is_not_waited_for():
    assert fewest_reported([3, 2]) == 2
    assert fewest_reported([3, 0]) == 0
    assert fewest_reported([10, 0]) == 10


def test_generated_text_can_be_learned():
    text = markov_text(np.random.default_rng(0), 50_000)
    pairs = text[:-1] * 1000 + text[1:]
    following = {pair: len(set(text[2:][pairs[:-1] == pair])) for pair in np.unique(pairs)[:20]}
    assert max(following.values()) <= 8


def test_only_servers_that_wait_for_nobody_depend_on_the_link():
    names = [
        *(f"lanes, {codec}" for codec in CODECS),
        "ddp",
        "alone",
        "server, 0, bf16",
        "server, 4, none",
        "server, inf, none",
    ]
    assert [name for name in names if has_staleness(name)] == ["server, 4, none", "server, inf, none"]


@pytest.mark.root
def test_two_hosts_reach_each_other_over_a_wire_that_counts_and_are_gone_afterwards():
    home = namespace()
    with two_hosts() as hosts:
        near = namespace()
        with hosts.on_remote():
            far = namespace()
            listener = socket.create_server((ADDRESSES[1], 0))
        assert len({home, near, far}) == 3
        hosts.shape(1000)
        before, _ = hosts.moved_bytes()
        thread = threading.Thread(target=lambda: listener.accept()[0].sendall(bytes(100_000)))
        thread.start()
        with socket.create_connection(listener.getsockname()) as sock:
            received = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        thread.join()
        assert len(received) == 100_000
        assert hosts.moved_bytes()[0] - before > 100_000
        hosts.unshape()
        listener.close()
    assert namespace() == home
