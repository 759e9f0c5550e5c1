"""What strangers say, and those who know the token and talk nonsense. It is told to nobody."""

import json

import pytest

from shoal.fleet.contact import read_contact
from shoal.wire.door import call_host
from shoal.wire.rows import pack
from tests.jobs.disturbed import JOBS, assert_same, calm, rows, script
from tests.jobs.nuisance import Nuisance

pytestmark = pytest.mark.usefixtures("soon")


def test_strangers_and_noise_change_nothing(run, place):
    job = JOBS["mlp"] | {"lanes": 6, "steps": 200}
    nuisance = Nuisance()
    outcome = run(job, look=nuisance.look, workers=3)
    nuisance.stop()
    assert_same(outcome, calm(run, job))
    assert outcome.receipt.deaths_survived == 0
    assert not rows(outcome, "stopped")
    assert nuisance.done > 20
    assert nuisance.ports > 3, "the driver's, and a worker's"
    assert not nuisance.let_in
    assert rows(outcome, "run_ended")[-1]["refused"] > 10, "they are counted"


NONSENSE = [("standing", {}), ("standing", {"view": "x", "position": 3}), ("standing", {"view": 99, "position": "far"}),
            ("beat", {"lane_s": [1]}), ("event", {"row": 7}), ("drain", {}), ("what", {})]  # fmt: skip


def test_one_that_knows_the_token_and_talks_nonsense_is_dropped(run, place):
    """As a worker and as a user. Nobody else notices."""

    def babble(paths, event, picture):
        if event.kind == "joined" and not links:
            contact = read_contact(paths.control)
            for kind, fields in NONSENSE:
                for role in ({"role": "user"}, worker):
                    link = call_host(contact.host, contact.port, contact.token, json.dumps(role).encode())
                    link.sendall(pack(kind, fields))
                    links.append(link)

    links = []
    address = {"host": "127.0.0.1", "port": 1, "host_id": "elsewhere", "unix": ""}
    worker = {"role": "worker", "seat": None, "local": False, "pid": 1, "host": "h", "address": address, "view": 0,
              "training": False}  # fmt: skip
    job = JOBS["mlp"] | {"lanes": 6, "steps": 200}
    outcome = run(job, look=babble, workers=2)
    assert len(links) == 2 * len(NONSENSE)
    for link in links:
        link.close()
    assert outcome.status == "finished", outcome.error
    assert outcome.receipt.weights_sha256 == calm(run, job).weights_sha256


def test_the_token_is_told_nowhere(run, place, capfd):
    outcome = run(JOBS["mlp"], workers=3, lanes=6, watch=script(place, "kill worker 1 at step 5 in exchange"))
    token = json.loads(outcome.paths.control.read_text())["token"]
    assert outcome.paths.control.stat().st_mode & 0o077 == 0
    files = [file for file in outcome.paths.root.rglob("*") if file.is_file() and file != outcome.paths.control]
    assert len(files) > 8
    assert not [file for file in files if token.encode() in file.read_bytes()]
    assert token not in "".join(capfd.readouterr())
