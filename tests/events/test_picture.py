"""The picture of a run, folded from its events."""

from shoal.events import Event, fold


def test_what_an_earlier_start_ended_with_does_not_count():
    told = [Event("run_started", fields={"run": "a"}), Event("finished", step=3, fields={"weights_sha256": "0"})]
    assert fold(told).result
    assert not fold([*told, Event("run_started", fields={"run": "a"})]).result


def test_servers_of_an_earlier_start_are_gone_until_they_are_told_of_again():
    held = {"server-0": {"primary_bytes": 5}, "server-1": {"primary_bytes": 6}}
    told = [
        Event("run_started", fields={"run": "a"}),
        Event("table", fields={"number": 3, "servers": held}),
        Event("run_started", fields={"run": "a"}),
        Event("server_started", fields={"server": "server-1", "pid": 1}),
    ]
    assert [server.name for server in fold(told[:2]).serving] == ["server-0", "server-1"]
    picture = fold(told)
    assert {name: server.state for name, server in picture.servers.items()} == {
        "server-0": "dead",
        "server-1": "starting",
    }
    assert picture.server_deaths == 0


def test_servers_that_lost_everything_hold_nothing():
    told = [
        Event("table", fields={"number": 1, "servers": {"server-0": {"primary_bytes": 5}}}),
        Event("servers_lost", fields={"reason": "why"}),
    ]
    server = fold(told).servers["server-0"]
    assert (server.state, server.primary_bytes) == ("starting", 0)


def test_a_server_that_fails_is_no_worker():
    picture = fold([Event("failed", who="server-2", fields={"code": "BUG", "message": "x", "where": "", "fix": ""})])
    assert picture.servers["server-2"].state == "failed"
    assert not picture.workers
