from __future__ import annotations

import uuid

import pytest

from .states import Told


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    return str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def told():
    return Told()
