"""The picture of a run, folded from its events."""

from shoal.events import Event, fold


def test_what_an_earlier_start_ended_with_does_not_count():
    told = [Event("run_started", fields={"run": "a"}), Event("finished", step=3, fields={"weights_sha256": "0"})]
    assert fold(told).result
    assert not fold([*told, Event("run_started", fields={"run": "a"})]).result
