"""The script of docs/launchers.md, started once per rank by a launcher: the same bits as one worker."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import MLP
from tests.fleet.ssh_server import free_port
from tests.jobs.fault_injection import reference_receipt

DOCS = Path(__file__).parents[2] / "docs" / "launchers.md"
JOB = MLP | {"steps": 200, "lanes": 4}
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "oob_tcp_if_include", "lo"]


def start_by_hand(command, environment, folder):
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, cwd=folder, stdout=subprocess.DEVNULL)
        for rank in range(2)
    ]
    assert [rank.wait(300) for rank in ranks] == [0, 0]


def start_by_mpi(command, environment, folder):
    words = [*MPIRUN, "--enable-recovery", "--continuous", "-x", "SHOAL_TOKEN", "-x", "ADDRESS", "-n", "2", *command]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "start",
    [
        start_by_hand,
        pytest.param(
            start_by_mpi,
            marks=[
                pytest.mark.ssh,  # whose target installs it
                pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: tools/install_sshd.sh"),
            ],
        ),
    ],
)
def test_a_launcher_starts_a_run(run, job_dir, start):
    script = re.search(r"<!-- file: start.sh -->\n```sh\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
    (job_dir / "start.sh").write_text(script.replace("--allow model.py", "--trust-code"))
    slow = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.1, "until": str(job_dir / "joined")}}]
    (job_dir / "job.yaml").write_text(yaml.safe_dump(JOB | {"watchers": slow}))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SHOAL_TOKEN": "0123456789abcdef" * 2,
        "ADDRESS": f"127.0.0.1:{free_port()}",
    }
    start(["sh", "start.sh"], environment, job_dir)
    receipt = json.loads((job_dir / "runs" / "mlp-1" / "receipt.json").read_text())
    assert len(receipt["carried"]) == 2
    assert receipt["weights_sha256"] == reference_receipt(run, JOB).weights_sha256
