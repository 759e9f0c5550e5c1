"""What a source has learnt from its rows: the numbers of classes, which columns are inputs, and how they become some.

It is saved with the model (model.json), so that later data is read in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from pydantic import Field

from shoal.spec.base import Spec
from shoal.spec.sources.config import Encoding, Missing


class ColumnEncoder(Spec):
    """How the values of one column become one or more inputs.

    `onehot` has an input for each of the `categories`, and `number` is the place in them, from 1; a value that is not
    among them gives zeros. `standard` is (value - mean) / deviation, of numbers or of seconds since 1970. `calendar` is
    sine and cosine of the time of day, of the week and of the year. `plain` is the number itself.
    """

    how: Literal["plain"] | Encoding = "plain"
    missing: Missing | None = None
    categories: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = Field(default=1.0, gt=0)


class Fits(Protocol):
    """A source, as far as this module needs it."""

    @property
    def classes(self) -> tuple[Any, ...] | None: ...

    @property
    def encoders(self) -> Mapping[str, ColumnEncoder]: ...

    @property
    def input_columns(self) -> tuple[str, ...] | None: ...


class Fitted(Spec):
    """What later data of the same model needs. `Fitted.of_model(info)` reads the content of model.json."""

    classes: tuple[Any, ...] | None = None
    encoders: dict[str, ColumnEncoder] = Field(default_factory=dict)
    input_columns: tuple[str, ...] | None = None

    @classmethod
    def of(cls, source: Fits) -> Fitted:
        return cls(classes=source.classes, encoders=dict(source.encoders), input_columns=source.input_columns)

    @classmethod
    def of_model(cls, info: Mapping[str, Any]) -> Fitted:
        return cls.model_validate({name: info[name] for name in cls.model_fields if info.get(name) is not None})

    def model_info(self) -> dict[str, Any]:
        """The entries of model.json."""
        return self.model_dump(mode="json")
