"""Compression of models on the worker's side: shapes, proofs, importance, files that other runtimes load, and their
measurement. Heavy libraries (onnx, onnxruntime, torch-pruning) are imported only where they are used."""

from shoal.compression.bounds import Bounds
from shoal.compression.dependency import find_groups
from shoal.compression.importance import by_magnitude, by_taylor, by_zeros, cut_least
from shoal.compression.lossless import cut_from_box, cut_from_samples, fold_step
from shoal.compression.onnx_files import OnnxModel
from shoal.compression.packed_file import read_packed, write_packed
from shoal.compression.proximal import ProximalAdam
from shoal.compression.shape import apply_steps

__all__ = [
    "Bounds",
    "OnnxModel",
    "ProximalAdam",
    "apply_steps",
    "by_magnitude",
    "by_taylor",
    "by_zeros",
    "cut_from_box",
    "cut_from_samples",
    "cut_least",
    "find_groups",
    "fold_step",
    "read_packed",
    "write_packed",
]
