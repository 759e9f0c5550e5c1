"""Which processes share a machine."""

import subprocess
import sys

import pytest

from shoal.net.host_id import host_id

PRINT = [sys.executable, "-c", "from shoal.net.host_id import host_id; print(host_id())"]


def test_processes_of_one_machine_have_the_same_id():
    assert subprocess.check_output(PRINT, text=True).strip() == host_id()


@pytest.mark.root
@pytest.mark.parametrize("namespace", [["--net"], ["--pid", "--fork", "--mount-proc"]])
def test_processes_in_other_namespaces_have_another(namespace):
    """They share no memory, or see other processes under the same numbers."""
    assert subprocess.check_output(["unshare", *namespace, *PRINT], text=True).strip() != host_id()
