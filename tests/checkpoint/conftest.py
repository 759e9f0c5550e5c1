from __future__ import annotations

import uuid

import pytest

from .states import EventRecorder


@pytest.fixture(params=["local", "memory"])
def store_path(request, tmp_path):
    return str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def recorder():
    return EventRecorder()
