"""The state of a run, folded from its events."""

from shoal.events import Event, RunState, replay

FINISHED = {
    "weights_sha256": "0", "state_sha256": "1", "samples_seen": 9, "metrics": {}, "stopped": "", "platform": {}
}  # fmt: skip


def test_what_an_earlier_start_ended_with_does_not_count():
    events = [Event("run_started", fields={"run": "a"}), Event("finished", step=3, fields=FINISHED)]
    assert replay(events).result
    assert not replay([*events, Event("run_started", fields={"run": "a"})]).result


def test_servers_of_an_earlier_start_are_gone_until_they_are_told_of_again():
    held = {"server-0": {"primary_bytes": 5}, "server-1": {"primary_bytes": 6}}
    events = [
        Event("run_started", fields={"run": "a"}),
        Event("chunk_table", fields={"number": 3, "servers": held}),
        Event("run_started", fields={"run": "a"}),
        Event("server_started", fields={"server": "server-1", "pid": 1}),
    ]
    assert [server.name for server in replay(events[:2]).serving_servers] == ["server-0", "server-1"]
    state = replay(events)
    assert {name: server.state for name, server in state.servers.items()} == {
        "server-0": "dead",
        "server-1": "starting",
    }
    assert state.server_deaths == 0


def test_servers_that_lost_everything_hold_nothing():
    events = [
        Event("chunk_table", fields={"number": 1, "servers": {"server-0": {"primary_bytes": 5}}}),
        Event("servers_lost", fields={"reason": "why"}),
    ]
    server = replay(events).servers["server-0"]
    assert (server.state, server.primary_bytes) == ("starting", 0)


def test_a_server_that_fails_is_no_worker():
    state = replay([Event("failed", who="server-2", fields={"code": "BUG", "message": "x", "where": "", "fix": ""})])
    assert state.servers["server-2"].state == "failed"
    assert not state.workers


def lost(step, *after):
    """A run that got as far as that with two workers, which then died; and what came after it."""
    joined = [Event("joined", who=f"worker-{n}", step=0, fields={"lanes": [n], "saves": n == 0}) for n in (0, 1)]
    trained = [Event("step", who="worker-0", step=step, fields={"steps": step})]
    died = [Event("worker_died", fields={"worker": f"worker-{n}", "reason": "killed"}) for n in (0, 1)]
    return replay([Event("run_started", fields={"run": "a"}), *joined, *trained, *died, *after])


def begun(number, step):
    return Event("joined", who=f"worker-{number}", step=step, fields={"lanes": [0], "saves": number == 2})


def test_steps_that_nobody_had_saved_are_made_again():
    state = lost(9, begun(3, 0), begun(2, 0))
    assert state.redone == 9
    assert [note["steps"] for note in state.notes if note.kind == "steps_lost"] == [9]


def test_so_they_are_when_another_driver_comes():
    assert lost(9, Event("run_started", fields={"run": "a"}), begun(2, 0)).redone == 9


def test_what_was_saved_is_counted_once():
    resumed = [Event("resumed", step=4, fields={"redone": 6}), begun(2, 4)]
    assert lost(9, *resumed).redone == 6
    assert lost(9, Event("resumed", step=0, fields={"source": "the beginning"}), begun(2, 0)).redone == 9


def test_who_is_left_has_lost_nothing():
    events = [
        begun(0, 0),
        begun(1, 0),
        Event("step", who="worker-0", step=9, fields={"steps": 9}),
        Event("worker_died", fields={"worker": "worker-1", "reason": "killed"}),
        begun(0, 9),
        begun(2, 9),
    ]
    assert replay(events).redone == 0


def test_seats_that_were_given_out_are_never_free_again():
    """Also those of processes that have never said anything."""
    state = RunState()
    for seats in (["worker-0", "worker-1"], ["server-7"], ["worker-2"], ["nobody"], []):
        state.apply(Event("seats_given", 1.0, "driver", None, {"seats": seats}))
    assert state.seats_given == 8
