"""What strangers say, and those who know the token and talk nonsense. It is told to nobody."""

import json

import pytest

from shoal.fleet.driver_address import read_driver_address
from shoal.net.listener import connect_host
from shoal.net.messages import encode_message
from tests.jobs.fault_injection import JOBS, assert_same, events_of_kind, fault_script, reference_receipt
from tests.jobs.port_scanner import PortScanner

pytestmark = pytest.mark.usefixtures("limited_time")


def test_strangers_and_malformed_input_change_nothing(run, job_dir):
    job = JOBS["mlp"] | {"lanes": 6, "steps": 200}
    scanner = PortScanner()
    outcome = run(job, look=scanner.on_event, workers=3)
    scanner.stop()
    assert_same(outcome, reference_receipt(run, job))
    assert outcome.receipt.deaths_survived == 0
    assert not events_of_kind(outcome, "stopped")
    assert scanner.attempts > 20
    assert len(scanner.called_ports) > 3, "the driver's, and a worker's"
    assert not scanner.accepted_ports
    assert events_of_kind(outcome, "run_ended")[-1]["refused"] > 10, "they are counted"


NONSENSE = [("standing", {}), ("standing", {"view": "x", "position": 3}), ("standing", {"view": 99, "position": "far"}),
            ("beat", {"lane_s": [1]}), ("beat", {"lanes_timed": 7}), ("beat", {"lanes_timed": [1e999, -1]}),
            ("beat", {"lanes_timed": [10**30, 1.0]}), ("event", {"row": 7}), ("drain", {}), ("what", {})]  # fmt: skip


def test_one_that_knows_the_token_and_talks_nonsense_is_dropped(run, job_dir):
    """As a worker and as a user. Nobody else notices."""

    def babble(paths, event, run_state):
        if event.kind == "joined" and not links:
            address = read_driver_address(paths.driver_address)
            for kind, fields in NONSENSE:
                for role in ({"role": "user"}, worker):
                    link = connect_host(address.host, address.port, address.token, json.dumps(role).encode())
                    link.sendall(encode_message(kind, fields))
                    links.append(link)

    links = []
    address = {"host": "127.0.0.1", "port": 1, "host_id": "elsewhere", "unix": ""}
    attachment = {"managed": False, "can_save": False, "needs_job": True}
    worker = {"role": "worker", "seat": None, "attachment": attachment, "pid": 1, "host": "h", "address": address,
              "view": 0, "training": False}  # fmt: skip
    job = JOBS["mlp"] | {"lanes": 6, "steps": 200}
    outcome = run(job, look=babble, workers=2)
    assert len(links) == 2 * len(NONSENSE)
    for link in links:
        link.close()
    assert outcome.status == "finished", outcome.error
    assert outcome.receipt.weights_sha256 == reference_receipt(run, job).weights_sha256


def test_the_token_is_told_nowhere(run, job_dir, capfd):
    outcome = run(
        JOBS["mlp"], workers=3, lanes=6, watchers=fault_script(job_dir, "kill worker 1 at step 5 in exchange")
    )
    token = json.loads(outcome.paths.driver_address.read_text())["token"]
    assert outcome.paths.driver_address.stat().st_mode & 0o077 == 0
    files = [file for file in outcome.paths.root.rglob("*") if file.is_file() and file != outcome.paths.driver_address]
    assert len(files) > 8
    assert not [file for file in files if token.encode() in file.read_bytes()]
    assert token not in "".join(capfd.readouterr())
