"""Bad settings give one line with key and fix, in Python and on the command line."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from clearhead.config import ModelConfig, preset
from clearhead.config.load import apply_overrides
from clearhead.config.recipe import load_recipe
from clearhead.config.settings import Settings
from clearhead.errors import ConfigError, UserError

# preset, overrides, key and part of the fix in the message
BAD: list[tuple[str, list[str], str, str]] = [
    ("tiny-gpt", ["head=4"], "head", "did you mean heads?"),
    ("tiny-gpt", ["model.dmi=64"], "dmi", "did you mean dim?"),
    ("tiny-gpt", ["zzzz=1"], "zzzz", "known: activation, attention"),
    ("tiny-gpt", ["heads=eight"], "heads", "not a whole number"),
    ("tiny-gpt", ["heads='8'"], "heads", "without quotes"),
    ("tiny-gpt", ["heads=2.5"], "heads", "not a whole number"),
    ("tiny-gpt", ["heads=true"], "heads", "not a whole number"),
    ("tiny-gpt", ["heads=null"], "heads", "not a whole number"),
    ("tiny-gpt", ["heads=[1, 2]"], "heads", "not a whole number"),
    ("tiny-gpt", ["heads=0"], "heads", "use 1 or more"),
    ("tiny-gpt", ["dim=-8"], "dim", "use 1 or more"),
    ("tiny-gpt", ["dim=999999999"], "dim", "use at most 65,536"),
    ("tiny-gpt", ["decoder_layers=100000"], "decoder_layers", "use at most 1,024"),
    ("tiny-gpt", ["dropout=1"], "dropout", "use less than 1"),
    ("tiny-gpt", ["attention_dropout=-0.1"], "attention_dropout", "use 0 or more"),
    ("tiny-gpt", ["dropout=high"], "dropout", "not a number"),
    ("tiny-gpt", ["dropout=.nan"], "dropout", "not a finite number"),
    ("tiny-gpt", ["norm_eps=0"], "norm_eps", "use more than 0"),
    ("tiny-gpt", ["bias=1"], "bias", "neither true nor false"),
    ("tiny-gpt", ["norm=layernorm"], "norm", "use layer, rms or batch"),
    ("tiny-gpt", ["activation=swish"], "activation", "use relu, gelu"),
    ("tiny-gpt", ["family=transformer"], "family", "use encoder-decoder, encoder or decoder"),
    ("tiny-gpt", ["attention=[full, sparse]"], "attention.1", "use full, window, strided or fixed"),
    ("tiny-gpt", ["attention=[]"], "attention", "name at least one"),
    ("tiny-gpt", ["attention=5"], "attention", "several like [full, window]"),
    ("tiny-gpt", ["outputs=null"], "outputs", "neither a name nor a list"),
    ("tiny-llama", ["rope_scaling=5"], "rope_scaling", "write rope_scaling.factor=…"),
    ("tiny-gpt", ["dim=010"], "dim", "not a whole number"),
    ("tiny-gpt", ["heads=!!timestamp 2020"], "heads", "tags (!name) are not supported"),
    ("tiny-gpt", ["heads=!!int"], "heads", "tags (!name) are not supported"),
    ("tiny-gpt", ["dim=" + "9" * 5000], "dim", "check the spelling"),
    ("tiny-gpt", ["dim=0x" + "f" * 5000], "dim", "not a whole number"),
    ("tiny-gpt", ["a\nb=1"], "'a\\nb'", "unknown setting"),
    ("tiny-gpt", ["k" * 100_000 + "=1"], "…", "unknown setting"),
    ("tiny-gpt", ["attention=[full, full, full]"], "attention", "at most one for each layer"),
    ("tiny-gpt", ["heads=3"], "heads", "does not divide dim 128"),
    ("tiny-gpt", ["kv_heads=3"], "kv_heads", "use a divisor of 4"),
    ("tiny-gpt", ["kv_heads=8"], "kv_heads", "use a divisor of 4"),
    ("tiny-llama", ["head_dim=33"], "head_dim", "use an even head_dim"),
    ("tiny-translator", ["dim=129", "heads=3", "head_dim=43"], "dim", "use an even dim"),
    ("tiny-gpt", ["encoder_layers=2"], "encoder_layers", "set encoder_layers to 0"),
    ("tiny-gpt", ["decoder_layers=0"], "decoder_layers", "set decoder_layers to 1 or more"),
    ("tiny-encoder", ["decoder_layers=2"], "decoder_layers", "set decoder_layers to 0"),
    ("tiny-translator", ["encoder_layers=0"], "encoder_layers", "set encoder_layers to 1 or more"),
    ("tiny-gpt", ["tie=all"], "tie", "use output or none"),
    ("tiny-gpt", ["vocab_size=null"], "vocab_size", "give the number of tokens"),
    ("tiny-gpt", ["source_vocab_size=9"], "source_vocab_size", "use vocab_size"),
    ("tiny-translator", ["source_vocab_size=9"], "vocab_size", "keep vocab_size for a shared vocabulary"),
    ("tiny-translator", ["vocab_size=null", "source_vocab_size=9"], "target_vocab_size", "give both"),
    (
        "tiny-translator",
        ["vocab_size=null", "source_vocab_size=9", "target_vocab_size=9"],
        "tie",
        "needs one shared vocabulary",
    ),
    ("tiny-gpt", ["attention=window"], "window", "set it, like window=256"),
    ("tiny-gpt", ["window=16"], "window", "remove window"),
    ("tiny-gpt", ["attention=strided"], "stride", "set it, like stride=128"),
    ("tiny-gpt", ["attention=fixed", "stride=8"], "summary", "set it, like summary=8"),
    ("tiny-gpt", ["attention=fixed", "stride=8", "summary=9"], "summary", "use at most 8"),
    ("tiny-gpt", ["rope_theta=1000.0"], "rope_theta", "use position=rotary"),
    ("tiny-gpt", ["rope_scaling.factor=8.0"], "rope_scaling", "use position=rotary"),
    ("tiny-llama", ["rope_scaling.facto=8.0"], "rope_scaling.facto", "did you mean factor?"),
    ("tiny-llama", ["rope_scaling=linear"], "rope_scaling", "'linear'"),
    (
        "tiny-llama",
        ["rope_scaling.factor=8.0", "rope_scaling.low_frequency_factor=4.0"],
        "rope_scaling",
        "must be below high_frequency_factor",
    ),
    ("tiny-llama", ["sinusoid=halves"], "sinusoid", "use position=sinusoidal"),
    ("tiny-gpt", ["segments=2"], "segments", "only an encoder has segments"),
    ("tiny-gpt", ["pooler=true"], "pooler", "set it to false"),
    ("tiny-translator", ["pooling=mean"], "pooling", "remove pooling"),
    ("tiny-encoder", ["pooler=false"], "outputs", "set pooler=true"),
    ("tiny-encoder", ["outputs=classes"], "labels", "like labels=2"),
    ("tiny-encoder", ["labels=3"], "labels", "set labels to 0"),
    ("tiny-encoder", ["outputs=[tags, tags]", "labels=3"], "outputs", "name each output once"),
    ("tiny-translator", ["outputs=tags", "labels=3"], "outputs", "family encoder-decoder has only lm"),
    ("tiny-gpt", ["dim"], "'dim'", "expected key=value"),
    ("tiny-gpt", ["=3"], "'=3'", "expected key=value"),
    ("tiny-gpt", ["dim.inner=3"], "dim.inner", "not a group of settings"),
    ("tiny-gpt", ["dim=["], "dim", "check the spelling"),
    ("tiny-gpt", ["heads=" + "x" * 99], "heads", "…"),
    ("tiny-gpt", ["family=2020-01-01"], "family", "'2020-01-01' is not allowed"),
    ("tiny-gpt", ["head_dim=0"], "head_dim", "use 1 or more"),
    ("tiny-gpt", ["kv_heads=0"], "kv_heads", "use 1 or more"),
    ("tiny-gpt", ["ff_dim=0"], "ff_dim", "use 1 or more"),
    ("tiny-gpt", ["max_positions=0"], "max_positions", "use 1 or more"),
    ("tiny-gpt", ["vocab_size=99999999"], "vocab_size", "use at most 16,777,216"),
    ("tiny-gpt", ["norm_eps=0.2"], "norm_eps", "use at most 0.1"),
    ("tiny-gpt", ["attention_dropout=1"], "attention_dropout", "use less than 1"),
    ("tiny-gpt", ["attention=window", "window=0"], "window", "use 1 or more"),
    ("tiny-gpt", ["attention=strided", "stride=0"], "stride", "use 1 or more"),
    ("tiny-gpt", ["attention=fixed", "stride=8", "summary=0"], "summary", "use 1 or more"),
    ("tiny-gpt", ["stride=8"], "stride", "remove stride"),
    ("tiny-translator", ["attention=[full, full, full]"], "attention", "at most one for each layer"),
    ("tiny-gpt", ["target_vocab_size=9"], "target_vocab_size", "use vocab_size"),
    ("tiny-encoder", ["segments=-1"], "segments", "use 0 or more"),
    ("tiny-encoder", ["outputs=tags", "labels=-1"], "labels", "use 0 or more"),
    ("tiny-llama", ["rope_theta=1"], "rope_theta", "use more than 1"),
    ("tiny-llama", ["rope_theta=null"], "rope_theta", "remove the line"),
    ("tiny-llama", ["rope_scaling.factor=0.5"], "rope_scaling.factor", "use 1 or more"),
    (
        "tiny-llama",
        ["rope_scaling.factor=8.0", "rope_scaling.low_frequency_factor=0"],
        "rope_scaling.low_frequency_factor",
        "use more than 0",
    ),
    (
        "tiny-llama",
        ["rope_scaling.factor=8.0", "rope_scaling.original_positions=0"],
        "rope_scaling.original_positions",
        "use 1 or more",
    ),
    ("tiny-gtp", [], "preset", "did you mean tiny-gpt?"),
]
NAMES = [" ".join([name, *changes])[:60] for name, changes, _, _ in BAD]


@pytest.mark.parametrize(("name", "changes", "key", "advice"), BAD, ids=NAMES)
def test_a_bad_config_gives_one_line_with_key_and_fix(name: str, changes: list[str], key: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preset(name, changes)
    lines = str(caught.value).splitlines()
    assert advice in lines[0]
    assert f"{key}: " in lines[0]
    assert len(lines) <= (2 if "facto=" in str(changes) else 1), lines  # there, a key is also missing
    assert len(lines[0]) < 700


def test_all_independent_contradictions_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        preset("tiny-gpt", ["tie=all", "kv_heads=3", "segments=2"])
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["tie", "kv_heads", "segments"]


def test_at_least_thirty_kinds_of_errors_are_covered() -> None:
    assert len({(key, advice) for _, _, key, advice in BAD}) >= 30


def test_a_bad_config_never_shows_a_traceback_or_builds_a_model() -> None:
    """Run the command line for all cases in one process, to save time."""
    script = """
import sys, json
from clearhead.cli import main
import clearhead.model.network as network
def forbidden(*_): raise RuntimeError("a bad config built a model")
network.Network.__init__ = forbidden
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["clearhead", "presets", *arguments]
    try:
        main()
    except SystemExit as stop:
        print("exit", stop.code, flush=True)
"""
    import json

    arguments = json.dumps([[name, "--", *changes] for name, changes, _, _ in BAD])
    done = subprocess.run([sys.executable, "-c", script, arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["exit 2"] * len(BAD)
    assert "Traceback" not in done.stderr
    assert all(line.startswith("clearhead: ") for line in done.stderr.splitlines())
    assert len(done.stderr.splitlines()) <= len(BAD) + 2


BAD_FILES = {
    "dim: 1\ndim: 2\n": "line 2: duplicate key 'dim'",
    "a: &x [1]\nb: *x\n": "line 2: aliases",
    "- dim\n- heads\n": "expected settings as `key: value` lines, found list",
    "just words": "expected settings as `key: value` lines, found str",
    "dim: [1,\n": "check the spelling and the indentation",
    "family: decoder\n\tdim: 3\n": "line 2",
    "1: 2\n": "1: a key must be a name",
    "true: 1\n": "True: a key must be a name",
    "!!bool xx: 1\n": "line 1: tags",
    "": "family: missing",
    "preset: tiny-gtp\n": "did you mean tiny-gpt?",
    "preset: 5\n": "no preset 5",
    "? [1, 2]\n: 3\n": "line 1",
    "[" * 5000: "nested too deeply",
    "dim: !!python/object/apply:os.system ['true']\n": "line 1",
}


@pytest.mark.parametrize("text", BAD_FILES, ids=[repr(text[:20]) for text in BAD_FILES])
def test_a_bad_file_is_reported_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        preset(str(path))
    assert str(caught.value).startswith(str(path)) or "preset" in str(caught.value)
    assert BAD_FILES[text] in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "latin.yaml").write_bytes(b"family: decoder\n# caf\xe9\n")
    (tmp_path / "large.yaml").write_bytes(b"#" * (1 << 21))
    for name, reason in {
        "missing.yaml": "does not exist",
        "folder.yaml": "is a folder",
        "latin.yaml": "line 2: not valid UTF-8",
        "large.yaml": "larger than",
    }.items():
        with pytest.raises(UserError, match=reason):
            preset(str(tmp_path / name))


def test_a_file_may_start_from_a_preset_and_overrides_win(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("preset: tiny-gpt\ndim: 64\nff_dim: 99  # a comment\nnorm_eps: 1e-6\n")
    config = preset(str(path), ["model.heads=2"])
    assert (config.dim, config.ff_dim, config.heads, config.head_dim) == (64, 99, 2, 32)
    assert config.norm_eps == 1e-6


def test_defaults_are_derived_from_other_settings() -> None:
    config = ModelConfig(family="decoder", decoder_layers=1, dim=48, heads=6, vocab_size=9)
    assert (config.kv_heads, config.head_dim, config.ff_dim) == (6, 8, 192)
    assert config.sinusoid == "interleaved"
    assert config.rope_theta is None


def test_a_config_survives_serialization() -> None:
    for name in ("tiny-llama", "transformer-base", "bert-base", "gpt3", "llama3.2-1b"):
        config = preset(name)
        assert ModelConfig.build(config.model_dump(mode="json")) == config


def test_a_config_is_immutable() -> None:
    with pytest.raises(Exception, match="frozen"):
        preset("tiny-gpt").dim = 3  # type: ignore[misc]


def test_yml_files_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text("preset: tiny-gpt\nff_dim: 99\n")
    assert preset(str(tmp_path / "mine.yml")).ff_dim == 99


def test_a_config_must_be_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"mine: expected settings as `key: value`, found \[1\]"):
        ModelConfig.build([1], where="mine")


def test_a_value_that_is_not_a_string_is_named() -> None:
    class Named(Settings):
        name: str

    with pytest.raises(ConfigError, match="name: 5 is not a string; give a name"):
        Named.build({"name": 5})


def test_overrides_do_not_change_the_original_settings() -> None:
    data = {"dim": 8, "rope_scaling": {"factor": 2.0}}
    changed = apply_overrides(data, ["dim=9", "rope_scaling.factor=4.0"])
    assert (changed["dim"], changed["rope_scaling"]) == (9, {"factor": 4.0})
    assert data == {"dim": 8, "rope_scaling": {"factor": 2.0}}


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_compile_accepts_on_and_off_in_yaml(word: str) -> None:
    assert load_recipe("copy", [f"train.compile={word}"]).train.compile == word


def test_a_settings_file_of_megabytes_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("a: [" + "0," * 100_000 + "]")
    start = time.process_time()
    with pytest.raises(ConfigError, match=r"large\.yaml: more than 65,536 characters, too many for settings"):
        preset(tmp_path / "large.yaml")
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("name", ["x" * 5000, "x\0y"])
def test_a_name_that_no_file_can_have_is_an_unknown_preset(name: str) -> None:
    for load, kind in ((preset, "preset"), (load_recipe, "recipe")):
        with pytest.raises(ConfigError, match=f"{kind}: no {kind} '") as caught:
            load(name)
        assert len(str(caught.value)) < 1000
