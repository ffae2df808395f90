"""Checksums of weights tell every accident from equality, whatever the layout in memory and the order of sums."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.forward import checksum as module
from paceline.forward.checksum import checksum, checksums
from paceline.schema import derive_seed
from tiny_models import tiny

_ROW = module._ROW
SIZES = (1, 7, 8, 9, _ROW * 2 + 3, _ROW * 4 * 5)


def weights(size, dtype=torch.float32, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_one_flipped_bit_anywhere_is_seen(size):
    tensor = weights(size)
    bits, first = tensor.view(torch.int32), checksum(tensor)
    rng = np.random.default_rng(size)
    for element in {0, size - 1, *rng.integers(0, size, 6).tolist()}:
        for bit in (0, 15, 31):
            mask = -(1 << 31) if bit == 31 else 1 << bit
            bits[element] ^= mask
            assert checksum(tensor) != first, (element, bit)
            bits[element] ^= mask
    assert checksum(tensor) == first


@pytest.mark.parametrize("apart", [1, 2, 5, _ROW * 2, _ROW * 4])
def test_two_swapped_elements_are_seen_also_where_they_differ_in_their_sign_alone(apart):
    tensor = weights(_ROW * 8)
    for value in (tensor[1].item(), -tensor[7 + apart].item()):
        swapped = tensor.clone()
        swapped[7] = value
        before = checksum(swapped)
        swapped[[7, 7 + apart]] = swapped[[7 + apart, 7]]
        assert checksum(swapped) != before


def test_swapped_words_whose_elements_all_differ_in_their_sign_alone_are_seen():
    tensor = weights(64)
    tensor[:4] = torch.tensor([1.5, -2.5, -1.5, 2.5])
    swapped = tensor.clone()
    swapped[:4] = tensor[[2, 3, 0, 1]]
    assert checksum(swapped) != checksum(tensor)


def test_dtype_and_shape_belong_to_it():
    zeros = torch.zeros(2, 6)
    sums = {checksum(zeros), checksum(zeros.view(6, 2)), checksum(zeros.view(12)), checksum(zeros.view(torch.int32))}
    assert len(sums) == 4
    assert checksum(torch.zeros(())) != checksum(torch.zeros(1))
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
    assert checksum(torch.empty(0)) != checksum(torch.empty(0, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])
def test_every_dtype_has_one(dtype):
    tensor = weights(101, dtype=dtype)
    other = tensor.clone()
    other[57] = other[57] == 0
    assert 0 <= checksum(tensor) == checksum(tensor.clone()) < 1 << 64
    assert checksum(other) != checksum(tensor)


def test_where_it_lies_in_memory_does_not_matter():
    tensor = weights(5 * _ROW, dtype=torch.bfloat16).view(5, _ROW)
    assert checksum(tensor.T) == checksum(tensor.T.contiguous()) != checksum(tensor)
    assert checksum(tensor[1:, 3:]) == checksum(tensor[1:, 3:].clone())
    assert checksum(tensor.view(-1)[1:]) == checksum(tensor.view(-1)[1:].clone())
    assert checksum(torch.nn.Parameter(tensor)) == checksum(tensor)


def test_how_many_rows_are_summed_at_once_does_not_matter(monkeypatch):
    tensor = weights(11 * _ROW + 77)
    first = checksum(tensor)
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", {"cpu": 4})
    assert checksum(tensor) == first


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), st.data())
def test_a_changed_word_always_changes_it(words, data):
    tensor = torch.tensor(words)
    place = data.draw(st.integers(0, len(words) - 1))
    changed = tensor.clone()
    changed[place] = data.draw(st.integers(-(2**63), 2**63 - 1).filter(lambda word: word != words[place]))
    assert checksum(changed) != checksum(tensor)


def in_integers(tensor):
    """The definition, in Python's own integers."""
    spread, data = 0x9E3779B97F4A7C15, tensor.numpy().tobytes()
    factors = [value % 2**64 for value in module._factors(tensor.device).tolist()]

    def row_sums(words):
        for start in range(0, len(words), _ROW):
            total = 0
            for word, factor in zip(words[start : start + _ROW], factors, strict=False):
                wide = word * spread % 2**64
                total += (wide ^ wide >> 32) * factor
            yield total % 2**64

    def summed(words):
        sums = list(row_sums(words))
        while len(sums) > 1:
            sums = list(row_sums(sums))
        return sums[0] if sums else 0

    words = [int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little") for at in range(0, len(data), 8)]
    whole = len(data) // 8
    total = summed(words[:whole]) * 3 + summed(words[whole:] or [0])
    return (total + derive_seed(tensor.dtype, tuple(tensor.shape))) % 2**64


@pytest.mark.parametrize("size", [0, 3, 16, _ROW * 3 + 5])
def test_it_is_its_definition_in_exact_integers(size):
    assert checksum(weights(size, seed=size)) == in_integers(weights(size, seed=size))
    assert all(factor % 2 for factor in module._factors(torch.device("cpu")).tolist())


def test_a_modules_tensors_are_listed_by_name_and_tied_ones_once():
    model = tiny()
    model.lm_head.weight = model.model.embed_tokens.weight
    sums = checksums(model, "policy.")
    names = {f"policy.{name}" for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert sums.keys() == names
    assert "policy.lm_head.weight" not in sums
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-9
    assert [name for name, value in checksums(model, "policy.").items() if value != sums[name]] == [
        "policy.model.norm.weight"
    ]
    assert checksums({"x": torch.ones(2)}) == {"x": checksum(torch.ones(2))}
