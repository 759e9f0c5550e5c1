"""Small whole numbers, several in a word, with one scale per block: `int4` and `int3`."""

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
MIN_STEP = 2.0**-120  # below, 1 / step would not be finite


@dataclass(frozen=True)
class PackedIntFormat:
    """-most..most. The step between them is the largest of a block's `typical` times the mean size of its values, and
    the size of its largest over `reach`: what is larger than `most` steps is cut off, and comes later. With a `reach`
    of `most` there is no such thing."""

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
        """The word of zeros: digits are numbers plus `most`."""
        return sum(self.max_int * self.base**i for i in range(self.per_word))


INT4 = PackedIntFormat(7, 2, torch.uint8, torch.int8, range_steps=7)
# For normal values `typical` is nearly the best step, and `reach` does nothing. Where few values are large, as in what
# an embedding gets, a third of them comes at once.
INT3 = PackedIntFormat(3, 5, torch.int16, torch.int16, range_steps=8, mean_factor=0.88)


class PackedInt(BlockwiseCodec):
    """What values are off by must not be forgotten.

    Values go in groups. Of a group, the first digits of all words come first, then the second ones, and so on: so all
    work is on neighbours. A block whose step is below 2**-120 becomes zeros. A block that holds a value that is not
    finite has a scale that is not finite, and all of it decodes to values that are not.
    """

    needs_residual = True

    def __init__(self, int_format: PackedIntFormat, block: int, scratch: ScratchBuffers) -> None:
        super().__init__(scratch)
        self.alignment = group_size(block, int_format.per_word)
        self._block = block
        self._int_format = int_format

    def size_bytes(self, count: int) -> int:
        words = block_count(count, self._int_format.per_word)
        return FLOAT_BYTES * block_count(count, self._block) + self._int_format.word.itemsize * words

    def _pieces(self, count: int, device: torch.device) -> Iterable[tuple[int, int]]:
        """Groups, on any device. A short rest goes with the one before it: each has two dozen kernels to start."""
        starts = list(range(0, count, self.alignment))
        if len(starts) > 1 and 2 * (count - starts[-1]) < self.alignment:
            starts.pop()
        return itertools.pairwise([*starts, count])

    def _sections(self, data: Tensor, count: int) -> tuple[Tensor, ...]:
        end = FLOAT_BYTES * block_count(count, self._block)
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
        words.view(int_format.signed).copy_(last)  # to what has a sign: torch is quick at that
        words.add_(int_format.zero_word)

    def _quantise(self, values: Tensor, steps: Tensor, digits: Tensor) -> None:
        """The numbers as floats, with zeros behind the last; and the steps."""
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
        """The numbers still lie there. Zeros have no sign in what is sent, and what is not finite reads as it reads."""
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
        """Each block times its factor. The last may be shorter."""
        whole = values.numel() // self._block
        end = whole * self._block
        shape = (whole, self._block)
        torch.mul(values[:end].view(shape), factors[:whole, None], out=out[:end].view(shape))
        if end < values.numel():
            torch.mul(values[end:], factors[whole:], out=out[end:])

    def _digit_buffer(self, like: Tensor) -> Tensor:
        """Room for a number each, in whole words and blocks."""
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
    """About as many values as are encoded at once, in whole blocks and words."""
    return block * per_word * max(GROUP_VALUES // (block * per_word), 1)
