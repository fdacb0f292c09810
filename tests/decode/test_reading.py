"""A packed network gives what the network gives, and leaves it as it was."""

from typing import Any

import pytest
import torch
from torch import nn

from clearhead.config import DecodeConfig
from clearhead.decode import packed
from clearhead.decode.packed import PackedLinear
from tests.decode.beside import gpt2, llama, marian, random_rows
from tests.decode.random_writers import same
from tests.decode.test_parity_transformers import ours


@pytest.mark.parametrize("make", [marian, gpt2, llama], ids=lambda make: make.__name__)
@pytest.mark.parametrize("beam", [1, 3])
def test_a_packed_network_writes_the_same_texts(make: Any, beam: int) -> None:
    pair, rows = make(), random_rows(12)
    config = DecodeConfig(max_new_tokens=10, beam=beam, scores=True)
    before = {name: tensor.clone() for name, tensor in pair.ours.state_dict().items()}
    twin = packed(pair.ours)
    assert sum(isinstance(module, PackedLinear) for module in twin.modules()) > 4
    assert same(ours(pair._replace(ours=twin), rows, config), ours(pair, rows, config))
    assert all(torch.equal(tensor, before[name]) for name, tensor in pair.ours.state_dict().items())
    assert not any(isinstance(module, PackedLinear) for module in pair.ours.modules())
    assert twin.decoder.embedding.tokens.weight is pair.ours.decoder.embedding.tokens.weight, "shared, not copied"


def test_what_cannot_be_packed_stays_as_it_is() -> None:
    network = gpt2().ours.double()
    assert packed(network) is network
    assert any(isinstance(module, nn.Linear) for module in packed(network).modules())
