"""Sources opened from plain data, as a job names them."""

import numpy as np
import pytest
from pydantic import TypeAdapter

from shoal.data.fitted import Fitted
from shoal.data.source import open_source
from shoal.errors import ShoalError
from shoal.spec.sources.config import SourceConfig

SOURCE_ADAPTER = TypeAdapter(SourceConfig)


def open_spec(tmp_path, **spec):
    """`on_bad_row`, `training_source`, `not_inputs` and `notify` are no part of the source: they go to the opening."""
    names = ("on_bad_row", "training_source", "not_inputs", "notify")
    options = {name: spec.pop(name) for name in names if name in spec}
    if "training_source" in options:
        options["fitted"] = Fitted.of(options.pop("training_source"))
    return open_source(
        SOURCE_ADAPTER.validate_python(spec), base_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"), **options
    )


def read_all(source):
    return source.take(np.arange(len(source)))


def open_failure(tmp_path, **spec):
    with pytest.raises(ShoalError) as caught:
        read_all(open_spec(tmp_path, **spec))
    return caught.value
