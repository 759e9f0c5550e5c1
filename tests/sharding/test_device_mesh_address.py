"""Where torch's groups listen: on the interface that the other hosts reach."""

import os

from shoal.sharding.device_mesh import INTERFACE_VARIABLE, gloo_listens_at


def test_gloo_listens_on_the_interface_of_the_address(monkeypatch):
    monkeypatch.delenv(INTERFACE_VARIABLE, raising=False)
    with gloo_listens_at("127.0.0.1"):
        assert os.environ[INTERFACE_VARIABLE] == "lo"
    assert INTERFACE_VARIABLE not in os.environ
    with gloo_listens_at("198.51.100.7"):
        assert INTERFACE_VARIABLE not in os.environ, "no interface has it"


def test_a_choice_of_the_user_stays(monkeypatch):
    monkeypatch.setenv(INTERFACE_VARIABLE, "eth9")
    with gloo_listens_at("127.0.0.1"):
        assert os.environ[INTERFACE_VARIABLE] == "eth9"
    assert os.environ[INTERFACE_VARIABLE] == "eth9"
