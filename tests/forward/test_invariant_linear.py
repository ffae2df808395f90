"""Packed linear layers: every number of rows gives equal bits, a written weight is packed anew, a fault is refused."""

import pytest
import torch

from paceline.forward import invariant_linear
from paceline.forward.invariant_attention import InvariantError
from paceline.forward.invariant_linear import ROWS, first_difference, pack, unpack


@pytest.mark.parametrize("shape", [(5, 7, True), (40, 32, False), (576, 1536, False), (640, 2048, True)])
def test_every_number_of_rows_gives_the_bits_of_one(shape):
    outputs, inputs, bias = shape
    layer = torch.nn.Linear(inputs, outputs, bias).requires_grad_(False)
    x = torch.randn(300, inputs)
    plain = layer(x)
    pack([("layer", layer)])
    alone = torch.cat([layer(row[None]) for row in x])
    for count in (1, 2, 3, 5, 7, 9, 16, 17, 31, 33, 65, 100, 127, 128, 129, 130, 257, 300):
        assert torch.equal(layer(x[:count]), alone[:count])
        assert torch.equal(layer(x[-count:]), alone[-count:])
    assert torch.equal(layer(x.view(3, 100, inputs)), alone.view(3, 100, outputs))
    assert torch.allclose(alone, plain, rtol=1e-4, atol=1e-5)
    assert layer(x[None, :0]).shape == (1, 0, outputs)


def test_the_ordinary_layer_depends_on_the_number_of_rows():
    layer = torch.nn.Linear(576, 576, bias=False).requires_grad_(False)
    x = torch.randn(64, 576)
    alone = torch.cat([layer(row[None]) for row in x])
    assert not all(torch.equal(layer(x[:count]), alone[:count]) for count in range(1, 65))


def test_a_weight_that_was_written_is_packed_anew_and_no_other():
    a, b = (torch.nn.Linear(8, 8, bias=False).requires_grad_(False) for _ in range(2))
    packed = pack([("a", a), ("b", b)])
    before = [linear._packed for linear in packed]
    with torch.no_grad():
        a.weight.copy_(torch.eye(8))
    for linear in packed:
        linear.refresh()
    assert packed[0]._packed is not before[0]
    assert packed[1]._packed is before[1]
    x = torch.randn(3, 8)
    assert torch.equal(a(x), x)


def test_unpacked_layers_are_as_they_were():
    layer = torch.nn.Linear(8, 8)
    unpack(pack([("layer", layer)]))
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("count", [ROWS[1], 48, ROWS[-1]])
@pytest.mark.parametrize("row", [0, -1])
def test_the_check_finds_one_other_bit_at_any_number_of_rows(count, row):
    def multiply(x):
        out = x * 1.5
        if len(x) == count:
            out[row, 0] = out[row, 0].nextafter(torch.tensor(torch.inf))
        return out

    assert first_difference(multiply, torch.randn(8, 4).repeat(16, 1)) == count


def test_a_processor_that_is_not_invariant_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(invariant_linear, "_checked", set())
    (packed,) = pack([("model.layers.0.mlp.up_proj", torch.nn.Linear(4, 6))])
    monkeypatch.setattr(packed, "_multiply", lambda x: x.cumsum(0))
    message = r"model.layers.0.mlp.up_proj \(6 x 4\) gives other bits for \d+ rows than for 2 .*engine.invariant=false$"
    with pytest.raises(InvariantError, match=message):
        packed.check()
