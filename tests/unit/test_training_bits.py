"""Bits of tensors: a changed bit shows, whatever the type, shape and layout."""

import pytest

torch = pytest.importorskip("torch")

from makespan.training.bits import WordSum, has_equal_bits, raw_bytes, word_sum_of

TENSORS = {
    "two dimensions": torch.ones(3, 5),
    "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "not at the start of a word": torch.ones(7)[1:],
    "with gaps": torch.ones(8, 8)[:, :3],
    "a number": torch.ones(()),
    "double": torch.ones(5, dtype=torch.float64),
    "half": torch.ones(9).half(),
    "bfloat16": torch.ones(3).bfloat16(),
    "complex": torch.ones(3, dtype=torch.complex64),
    "complex double": torch.ones(3, dtype=torch.complex128),
    "bool": torch.ones(11, dtype=torch.bool),
    "int8": torch.ones(13, dtype=torch.int8),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_each_bit_is_in_the_sum_of_words_and_counts_for_equality(tensor):
    tensor_sum, size = int(word_sum_of([tensor])), tensor.element_size()
    in_order = tensor.clone(memory_format=torch.contiguous_format)
    before = int(word_sum_of([in_order]))
    for byte in range(tensor.numel() * size):
        for bit in range(1 if tensor.dtype == torch.bool else 8):
            bits = raw_bytes(tensor).clone()
            bits[byte] ^= 1 << bit
            changed = bits.view(tensor.dtype).reshape(tensor.shape)
            assert int(word_sum_of([changed])) != before
            assert not has_equal_bits(tensor, changed)
    assert has_equal_bits(tensor, tensor.clone())
    assert int(word_sum_of([tensor, torch.ones(2)])) != tensor_sum


def test_equality_is_that_of_bits_type_and_shape():
    nan = torch.tensor([float("nan")])
    assert has_equal_bits(nan, nan.clone())
    assert not has_equal_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not has_equal_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not has_equal_bits(torch.zeros(2), torch.zeros(2, 1))
    assert has_equal_bits(torch.zeros(0), torch.zeros(0))


def test_a_sum_follows_tensors_that_change_move_or_have_gaps():
    tensors = [torch.ones(4, 4), torch.ones(8, 8)[:, :3]]
    sums = WordSum(tensors)
    assert int(sums()) == int(word_sum_of(tensors))
    tensors[0][1, 2] = 5.0
    tensors[1][7, 2] = 3.0
    assert int(sums()) == int(word_sum_of(tensors))
    tensors[0].data = torch.full((4, 4), 2.0)
    assert int(sums()) == int(word_sum_of(tensors))
    assert int(word_sum_of([])) == 0
