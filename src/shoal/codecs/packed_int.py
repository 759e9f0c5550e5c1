"""Small integers, several per word, with one scale per block: `int4` and `int3`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.codecs.blockwise import BlockwiseCodec
from shoal.codecs.codec import ScratchBuffers
from shoal.codecs.size import FLOAT_BYTES, block_count

GROUP_VALUES = 1 << 19
MIN_STEP = 2.0**-120  # below this, 1 / step would not be finite


@dataclass(frozen=True)
class PackedIntFormat:
    """Integers from -max_int to max_int. The step of a block is the larger of `mean_factor` times its mean magnitude
    and its largest magnitude over `range_steps`. Values beyond `max_int` steps are clipped, and the residual sends the
    rest later. With `range_steps` equal to `max_int` no value is clipped."""

    max_int: int
    per_word: int
    word: torch.dtype
    signed: torch.dtype
    range_steps: float
    mean_factor: float = 0.0

    @property
    def base(self) -> int:
        return 1 << (2 * self.max_int).bit_length()

    @property
    def zero_word(self) -> int:
        """The word that encodes zeros: a digit is the integer plus `max_int`."""
        return sum(self.max_int * self.base**i for i in range(self.per_word))


INT4 = PackedIntFormat(7, 2, torch.uint8, torch.int8, range_steps=7)
# For normally distributed values `mean_factor` gives nearly the best step, and `range_steps` has no effect. Where few
# values are large, as in gradients of embeddings, a third of a large value is sent at once.
INT3 = PackedIntFormat(3, 5, torch.int16, torch.int16, range_steps=8, mean_factor=0.88)


class PackedInt(BlockwiseCodec):
    """Needs error feedback.

    Values are encoded in groups. A group stores the first digits of all words, then the second digits, and so on, so
    that all work is on contiguous memory. A block whose step is below 2**-120 becomes zeros. A block with a value that
    is not finite gets a scale that is not finite, so all of its values decode to values that are not finite.
    """

    needs_residual = True

    def __init__(self, int_format: PackedIntFormat, block: int, scratch: ScratchBuffers) -> None:
        super().__init__(scratch)
        self.alignment = group_size(block, int_format.per_word)
        self._block = block
        self._int_format = int_format

    def size_bytes(self, count: int) -> int:
        words = block_count(count, self._int_format.per_word)
        return self._scales_bytes(count) + self._int_format.word.itemsize * words

    def _pieces(self, count: int, device: torch.device) -> Iterable[tuple[int, int]]:
        """Groups, on any device. A short rest joins the group before it, because a group starts two dozen kernels."""
        starts = list(range(0, count, self.alignment))
        if len(starts) > 1 and 2 * (count - starts[-1]) < self.alignment:
            starts.pop()
        return itertools.pairwise([*starts, count])

    def _whole_blocks(self, count: int, start: int, stop: int) -> tuple[int, int]:
        """Whole groups: the digits of a word are those of values far apart."""
        groups = [(a, b) for a, b in self._pieces(count, torch.device("cpu")) if a < stop and start < b]
        return groups[0][0], groups[-1][1]

    def _scales_bytes(self, count: int) -> int:
        return FLOAT_BYTES * block_count(count, self._block)

    def _sections(self, data: Tensor, count: int) -> tuple[Tensor, ...]:
        end = self._scales_bytes(count)
        return data[:end].view(torch.float32), data[end:].view(self._int_format.word)

    def _encode_piece(self, values: Tensor, sections: tuple[Tensor, ...], start: int) -> None:
        int_format = self._int_format
        steps, words = self._section_slices(sections, start, values)
        digits, count = self._digit_buffer(values), len(words)
        self._quantise(values, steps, digits)
        sums = self._scratch.get("sums", count, torch.float32, values.device)
        last = digits[(int_format.per_word - 1) * count : int_format.per_word * count]
        for i in reversed(range(int_format.per_word - 1)):
            last = torch.add(digits[i * count : (i + 1) * count], last, alpha=int_format.base, out=sums)
        words.view(int_format.signed).copy_(last)  # torch is faster with a signed type
        words.add_(int_format.zero_word)

    def _quantise(self, values: Tensor, steps: Tensor, digits: Tensor) -> None:
        """Write the steps, and the integers as floats, padded with zeros."""
        int_format, count = self._int_format, values.numel()
        torch.abs(values, out=digits[:count])
        if len(digits) > count:
            digits[count:].zero_()
        rows = digits[: len(steps) * self._block].view(-1, self._block)
        torch.amax(rows, 1, out=steps).div_(int_format.range_steps)
        if int_format.mean_factor:
            mean = self._scratch.get("mean", len(steps), torch.float32, values.device)
            torch.sum(rows, 1, out=mean).mul_(int_format.mean_factor / self._block)
            if rest := count % self._block:
                mean[-1:].mul_(self._block / rest)
            torch.maximum(mean, steps, out=steps)
        tiny = steps < MIN_STEP
        factors = torch.reciprocal(steps).masked_fill_(tiny, 0)
        steps.masked_fill_(tiny, 0)
        self._multiply_blocks(values, factors, digits[:count])
        if int_format.range_steps > int_format.max_int:
            digits.clamp_(-int_format.max_int, int_format.max_int)
        digits.round_()

    def _decode_last_piece(self, sections: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        """Uses the digits that `_encode_piece` left in the scratch buffer. Zeros have no sign, as in the encoded
        bytes."""
        steps, _ = self._section_slices(sections, start, out)
        if math.isfinite(float(steps.sum())):
            self._multiply_blocks(self._digit_buffer(out)[: out.numel()], steps, out)
            out.add_(0.0)
        else:
            self._decode_piece(sections, start, out)

    def _decode_piece(self, sections: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        int_format = self._int_format
        steps, words = self._section_slices(sections, start, out)
        digits, count = self._digit_buffer(out), len(words)
        digit = self._scratch.get("digit", count, int_format.word, out.device)
        for i in range(int_format.per_word):
            torch.bitwise_right_shift(words, i * (int_format.base.bit_length() - 1), out=digit)
            digits[i * count : (i + 1) * count].copy_(digit.bitwise_and_(int_format.base - 1))
        torch.sub(digits[: out.numel()], int_format.max_int, out=out)
        self._multiply_blocks(out, steps, out)

    def _multiply_blocks(self, values: Tensor, factors: Tensor, out: Tensor) -> None:
        """Multiply each block by its factor. The last block may be shorter."""
        whole = values.numel() // self._block
        end = whole * self._block
        shape = (whole, self._block)
        torch.mul(values[:end].view(shape), factors[:whole, None], out=out[:end].view(shape))
        if end < values.numel():
            torch.mul(values[end:], factors[whole:], out=out[end:])

    def _digit_buffer(self, like: Tensor) -> Tensor:
        """A buffer with room for one digit per value, rounded up to whole words and blocks."""
        count, per_word = like.numel(), self._int_format.per_word
        size = max(per_word * block_count(count, per_word), self._block * block_count(count, self._block))
        return self._scratch.get("digits", size, torch.float32, like.device)

    def _section_slices(self, sections: tuple[Tensor, ...], start: int, values: Tensor) -> tuple[Tensor, Tensor]:
        steps, words = sections
        first, word = start // self._block, start // self._int_format.per_word
        count = values.numel()
        last, end = first + block_count(count, self._block), word + block_count(count, self._int_format.per_word)
        return steps[first:last], words[word:end]


def group_size(block: int, per_word: int) -> int:
    """Values per group: about `GROUP_VALUES`, in whole blocks and words."""
    return block * per_word * max(GROUP_VALUES // (block * per_word), 1)
