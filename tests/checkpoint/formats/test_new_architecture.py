"""An architecture is added by one file of under 120 lines: import, export and round trip equal transformers."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import export_model, huggingface, import_model
from clearhead.errors import UserError
from tests.checkpoint.formats import starcoder2
from tests.model.peers import disturb

SETTINGS = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
SETTINGS |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 97, "bos_token_id": None}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_one_file_adds_an_architecture(
    window: int | None, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(Path(starcoder2.__file__).read_text().splitlines()) < 120
    config = transformers.Starcoder2Config(
        **SETTINGS, sliding_window=window, tie_word_embeddings=tied, eos_token_id=None, attn_implementation="eager"
    )
    theirs = transformers.Starcoder2ForCausalLM(config).eval()
    disturb(theirs, 0.12)
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(UserError, match="model_type: 'starcoder2' is not supported; supported: bert, roberta"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    monkeypatch.setattr(huggingface, "ADAPTERS", (*huggingface.ADAPTERS, starcoder2.STARCODER2))
    import_model(tmp_path / "theirs", tmp_path / "ours")
    loaded = load_model(tmp_path / "ours")
    ids = torch.randint(97, (2, 17))
    expected = theirs(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(loaded.network(ids), expected, atol=1e-5, rtol=0)
    export_model(loaded, tmp_path / "back", "hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "starcoder2"
    back = transformers.Starcoder2ForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    torch.testing.assert_close(back(ids).logits, expected, atol=1e-5, rtol=0)
