"""ONNX files compute what the model computes, with any batch; the bytes depend on the model alone."""

import math

import pytest
import torch
from torch import nn

from shoal.checkpoint.export import save_program
from shoal.compression.onnx_files import OnnxModel, export_onnx, observe_ranges, quantise_onnx
from shoal.errors import ShoalError
from shoal.plan.compression import join_ranges
from shoal.tasks.own_loss import with_plain_inputs
from tests.compression.networks import Residual, Transformer, dense, randomise_norms

onnx = pytest.importorskip("onnx", reason="the extra compress is not installed")
for library in ("onnxscript", "onnxruntime"):
    pytest.importorskip(library, reason="the extra compress is not installed")


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: dense(8, 16, 3), torch.rand(7, 8)),
        pytest.param(Residual, torch.rand(7, 1, 8, 8), marks=pytest.mark.long),
        pytest.param(Transformer, torch.randint(0, 20, (7, 12)), marks=pytest.mark.long),
    ],
    ids=["dense", "convolutions", "transformer"],
)
def test_the_file_computes_what_the_model_does(tmp_path, make, x):
    torch.manual_seed(0)
    model = randomise_norms(make())
    export_onnx(model, (x[:2],), tmp_path / "model.onnx")
    runtime = OnnxModel(tmp_path / "model.onnx")
    with torch.no_grad():
        for count in (1, 7):
            assert (runtime(x[:count]) - model(x[:count])).abs().max() < 1e-5
        one, other = (observe_ranges(tmp_path / "model.onnx", [(part,)]) for part in (x[:4], x[4:]))
        both = observe_ranges(tmp_path / "model.onnx", [(x[4:],), (x[:4],)])
        assert join_ranges([one, other]) == join_ranges([other, one]) == both
        quantise_onnx(tmp_path / "model.onnx", tmp_path / "small.onnx", join_ranges([one, other]))
        quantise_onnx(tmp_path / "model.onnx", tmp_path / "again.onnx", both)
        rounded = OnnxModel(tmp_path / "small.onnx")(x)
    assert (tmp_path / "small.onnx").read_bytes() == (tmp_path / "again.onnx").read_bytes()
    graph = onnx.load(tmp_path / "small.onnx").graph
    kinds = {node.op_type for node in graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds
    assert "DynamicQuantizeLinear" not in kinds, "ranges are in the file"
    matrices = {one.name: (one.data_type, math.prod(one.dims)) for one in graph.initializer if len(one.dims) > 1}
    bytewise = [size for kind, size in matrices.values() if kind in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)]
    assert sum(bytewise) > 0.95 * sum(size for _, size in matrices.values()), "all but places, which are added"
    assert not torch.equal(rounded, model(x))
    assert (rounded - model(x)).abs().max() < 0.1 * model(x).abs().max()
    assert str(tmp_path).encode() not in (tmp_path / "model.onnx").read_bytes()
    assert b".py" not in (tmp_path / "model.onnx").read_bytes()


def test_what_cannot_be_written_is_told(tmp_path):
    with pytest.raises(ShoalError, match="tensors as inputs"):
        export_onnx(nn.Identity(), ({"x": 1},), tmp_path / "model.onnx")
    with pytest.raises(ShoalError, match="no samples"):
        observe_ranges(tmp_path / "model.onnx", [])
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(ShoalError, match="cannot load"):
        OnnxModel(tmp_path / "bad.onnx")
    assert not (tmp_path / "model.onnx").exists()


class Named(nn.Module):
    """Two inputs by name, and an answer with a name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x=None, scale=None, labels=None):
        return {"logits": self.layer(x) * scale}


@pytest.mark.long
def test_inputs_by_name_have_batches_of_any_size(tmp_path):
    model = Named()
    plain, inputs = with_plain_inputs(model, ({"x": torch.rand(2, 4), "scale": torch.rand(2, 1), "labels": 1},))
    export_onnx(plain, inputs, tmp_path / "model.onnx")
    save_program(plain, inputs, tmp_path / "model.pt2")
    more = torch.rand(7, 4), torch.rand(7, 1)
    with torch.no_grad():
        wanted = model(*more)["logits"]
        for made in (OnnxModel(tmp_path / "model.onnx"), torch.export.load(tmp_path / "model.pt2").module()):
            assert (made(*more) - wanted).abs().max() < 1e-5
