"""Torch's private attention kernels against matrices, alone and as parts of a joint softmax."""

import pytest
import torch

from paceline.cotrain import kernels

TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 5e-2}
SHAPES = {"own heads": (4, 4, 8), "shared heads": (4, 2, 8), "odd size": (3, 1, 12)}


def sides(rows, keys, heads, shared, size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, heads, size), (keys, shared, size), (keys, shared, size), (rows, heads, size))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rows", "keys", "causal"), [(7, 7, True), (5, 9, False), (1, 1, True), (33, 33, True)])
def test_the_kernel_is_the_dense_reference(shape, dtype, rows, keys, causal):
    query, key, value, grad = sides(rows, keys, *SHAPES[shape], dtype)
    assert kernels.has_kernel(query, value)
    out, lse = kernels.attend(query, key, value, causal, 0.3)
    wanted, wanted_lse = kernels.dense(query, key, value, causal, 0.3)
    bar = TOLERANCES[dtype]
    torch.testing.assert_close(out, wanted, atol=bar, rtol=bar)
    torch.testing.assert_close(lse, wanted_lse, atol=bar, rtol=bar)
    # Given the log-sum-exp and the output of a larger attention, as parts are.
    larger, joint = wanted_lse + 0.5, out * 0.6
    given = (grad, query, key, value, joint, larger, causal, 0.3)
    for own, reference in zip(kernels.attend_backward(*given), kernels.dense_backward(*given), strict=True):
        torch.testing.assert_close(own, reference, atol=bar, rtol=bar)


def test_the_dense_reference_is_autograd_s_softmax():
    query, key, value, grad = sides(6, 6, 4, 2, 8, torch.float64)
    for side in (query, key, value):
        side.requires_grad_(True)
    spread_key, spread_value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = torch.einsum("nhd,mhd->hnm", query, spread_key) * 0.3
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), spread_value)
    out.backward(grad)
    with torch.no_grad():
        own, lse = kernels.dense(query, key, value, True, 0.3)
        grads = kernels.dense_backward(grad, query, key, value, own, lse, True, 0.3)
    assert (own - out).abs().max() < 1e-13
    for side, given in zip((query, key, value), grads, strict=True):
        assert (side.grad - given).abs().max() < 1e-13


def test_heads_whose_values_have_another_size_go_through_matrices():
    query, key, _, _ = sides(5, 5, 4, 2, 8, torch.float64)
    value = torch.randn((5, 2, 6), dtype=torch.float64)
    assert not kernels.has_kernel(query, value)
    assert kernels.attend(query, key, value, True, 0.3)[0].shape == (5, 4, 6)


def test_what_kernels_die_of_is_refused():
    query, key, value, _ = sides(3, 3, 2, 2, 4, torch.float32)
    for rows, keys, causal in ((3, 0, False), (0, 3, False), (2, 3, True)):
        with pytest.raises(ValueError, match=f"{rows} queries over {keys} keys"):
            kernels.attend(query[:rows], key[:keys], value[:keys], causal, 1.0)


@pytest.mark.parametrize(("rows", "keys", "causal"), [(7, 7, True), (5, 9, False)])
def test_cudas_kernel_is_called_as_this_torch_declares_it(rows, keys, causal):
    query, key, value, grad = (side.to("meta") for side in sides(rows, keys, 4, 2, 8, torch.bfloat16))
    out, lse = kernels.varlen(query, key, value, causal, 0.3)
    assert (out.shape, lse.shape, lse.dtype) == ((rows, 4, 8), (rows, 4), torch.float32)
    grads = kernels.varlen_backward(grad, query, key, value, out, lse, causal, 0.3)
    assert [each.shape for each in grads] == [query.shape, key.shape, value.shape]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(4, 4, 64), (4, 2, 64), (8, 1, 128)])
@pytest.mark.parametrize(("rows", "keys", "causal"), [(7, 7, True), (5, 9, False), (1, 1, True), (300, 300, True)])
def test_cudas_kernel_is_the_dense_reference(shape, rows, keys, causal):
    query, key, value, grad = (side.cuda() for side in sides(rows, keys, *shape, torch.bfloat16))
    assert kernels.has_kernel(query, value)
    out, lse = kernels.attend(query, key, value, causal, 0.3)
    wanted, wanted_lse = kernels.dense(query, key, value, causal, 0.3)
    torch.testing.assert_close(out, wanted, atol=5e-2, rtol=5e-2)
    torch.testing.assert_close(lse, wanted_lse, atol=5e-2, rtol=5e-2)
    given = (grad, query, key, value, out * 0.6, wanted_lse + 0.5, causal, 0.3)
    for own, reference in zip(kernels.attend_backward(*given), kernels.dense_backward(*given), strict=True):
        torch.testing.assert_close(own, reference, atol=5e-2, rtol=5e-2)
