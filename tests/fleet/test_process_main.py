"""A process that the driver does not know leaves, and the run does not fail because of it."""

from __future__ import annotations

from shoal.errors import error
from shoal.events import EventWriter, read_events
from shoal.fleet.process_main import connect_to_driver, run_reporting_errors


class DeafDriver:
    def connect(self, timeout_s):
        raise error("SH610", f"no welcome from the driver in {timeout_s:g} s")


def test_a_process_that_is_not_welcome_leaves_without_failing_the_run(tmp_path, capsys):
    stream = EventWriter(tmp_path / "events.jsonl", "worker-9")
    assert run_reporting_errors(stream, lambda stream: connect_to_driver(DeafDriver())) == 6
    assert "no welcome" in capsys.readouterr().err
    assert [event.kind for event in read_events(tmp_path / "events.jsonl")] == []
