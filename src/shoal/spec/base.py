"""The base of all specs: frozen, and without unknown fields."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

_SIZE = re.compile(r"(?=.*[1-9])(\d{1,6}(?:\.\d{1,6})?) ?(MB|GB|TB)")
_BYTES = {"MB": 10**6, "GB": 10**9, "TB": 10**12}


class Spec(BaseModel):
    """Validated, immutable data. `model_copy(update=...)` makes a changed copy."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
        protected_namespaces=(),
    )


class Ref(Spec):
    """A class or function by name, with arguments: `package.module:name`, `file.py:name` or a short name.

    A short name (`AdamW`) is looked up in the modules of the field (`torch.optim` for an optimizer).
    """

    name: str = Field(min_length=1)
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        """Accept a name alone or, in Python, the class or function itself."""
        if not isinstance(value, dict | Ref):
            value = {"name": value}
        if isinstance(value, dict) and callable(value.get("name")):
            from shoal.spec.resolve import ref_of

            return {**value, "name": ref_of(value["name"])}
        return value


def parse_size(text: str) -> int:
    """A size such as 2 GB in bytes. ValueError, in words, if it is not a size."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError("write a size such as 512 MB or 2 GB")
    return int(float(found[1]) * _BYTES[found[2]])
