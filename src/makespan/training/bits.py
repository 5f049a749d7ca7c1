"""Bits of tensors: their bytes, and sums of their words that tell whether a bit has changed."""

from collections.abc import Iterable

import torch
from torch import Tensor

_WORD = 8  # bytes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def raw_bytes(tensor: Tensor) -> Tensor:
    """Bytes of a tensor, flat and on the CPU; the tensor is copied only if needed."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def has_equal_bits(left: Tensor, right: Tensor) -> bool:
    """Compare two tensors as bytes, so that NaN equals itself and 0.0 differs from -0.0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    bits, others = (part.detach().contiguous().reshape(-1).view(torch.uint8) for part in (left, right))
    return torch.equal(bits, others.to(bits.device))


class WordSum:
    """Sum of the words of tensors of one device, modulo 2^64; a change of one word changes the sum.

    It takes a tenth of the time of a hash, or less. Views of the words are kept from one call to the next.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._views: list[Tensor] = []
        self._places: list[tuple[int, tuple[int, ...]]] = []

    def __call__(self) -> Tensor:
        """Return the sum, a scalar of the device: int64, ()."""
        places = [(tensor.data_ptr(), tensor.stride()) for tensor in self._tensors]
        if places != self._places:
            words = [_words_of(tensor) for tensor in self._tensors]
            self._views = [view for views in words for view in views]
            # Words that had to be copied do not follow the tensor: the next call copies them again.
            is_copied = any(
                views[0].data_ptr() != tensor.data_ptr()
                for tensor, views in zip(self._tensors, words, strict=True)
                if tensor.numel()
            )
            self._places = [] if is_copied else places
        # A view of integers narrower than a word is summed as words, too.
        sums = [view.sum(dtype=torch.int64) for view in self._views]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)


def word_sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the `WordSum` of tensors once."""
    return WordSum(tensors)()


def _words_of(tensor: Tensor) -> list[Tensor]:
    """Return the words of a tensor, and what is left behind the last whole one."""
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach()
    # In the order of the memory, if there are no gaps: no copy, whatever the memory format.
    flat = flat.as_strided((extent,), (1,)) if extent == tensor.numel() else flat.reshape(-1)
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()
    per_word = max(_WORD // flat.element_size(), 1)
    n_whole = flat.numel() // per_word * per_word
    words = [flat[:n_whole].view(torch.int64)]
    if n_whole < flat.numel():
        words.append(flat[n_whole:].view(_INTEGERS[flat.element_size()]))
    return words
