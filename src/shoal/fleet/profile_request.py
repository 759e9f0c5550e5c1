"""A request for a profile of some steps: a file in the run's directory that every worker looks for between steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError

from shoal.spec.base import Spec

MAX_PROFILED_STEPS = 200
MAX_REQUEST_BYTES = 4096


class ProfileRequest(Spec):
    """Workers profile the steps from `first_step` on, each into `profiles/NAME/worker-0.json`."""

    model_config = ConfigDict(strict=True)

    name: Annotated[str, Field(pattern=r"^[0-9a-f-]{1,40}$")]
    first_step: Annotated[int, Field(ge=0, lt=1 << 53)]
    steps: Annotated[int, Field(ge=1, le=MAX_PROFILED_STEPS)]

    @property
    def end(self) -> int:
        return self.first_step + self.steps


def read_profile_request(path: Path) -> ProfileRequest | None:
    """None if the file is not there, or is no request."""
    try:
        with path.open("rb") as file:
            return ProfileRequest.model_validate(json.loads(file.read(MAX_REQUEST_BYTES)))
    except (OSError, ValueError, ValidationError, RecursionError):
        return None
