"""config.json in its old and new forms, EOS from everywhere, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from files import edit_json
from models import EOS, EOT, LLAMA3_SCALING, llama_config, write_byte_tokenizer

from tinyvllm_cli.checkpoint.config import ModelConfig, RopeConfig, read_config, scan_config
from tinyvllm_cli.errors import UserError


def write(folder: Path, **options: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(llama_config(**options)))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_config(folder)
    assert str(folder / "config.json") in str(caught.value)
    return str(caught.value)


def test_the_plain_case(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, dtype="bfloat16")) == ModelConfig(
        hidden_size=256,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=512,
        vocab_size=300,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        max_position_embeddings=512,
        bos_token_id=256,
        eos_token_ids=(257,),
        dtype="bfloat16",
    )


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    write(tmp_path, eos=None)
    gone = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings", "torch_dtype")
    edit_json(tmp_path / "config.json", **dict.fromkeys((*gone, "tie_word_embeddings", "architectures"), ...))
    config = read_config(tmp_path)
    assert (config.num_kv_heads, config.rms_norm_eps, config.max_position_embeddings) == (4, 1e-6, 2048)
    assert (config.rope.theta, config.tie_word_embeddings, config.eos_token_ids) == (10000.0, False, ())


def test_head_dim_of_its_own(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, head_dim=128)).head_dim == 128
    assert read_config(write(tmp_path, hidden=250, head_dim=64)).head_dim == 64


# --- RoPE ------------------------------------------------------------------------------------------------------------

LLAMA3 = RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 64)


@pytest.mark.parametrize("form", ["old", "new"])
@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, RopeConfig(500000.0)),
        ({"rope_type": "default"}, RopeConfig(500000.0)),
        ({"rope_type": "linear", "factor": 2.5}, RopeConfig(500000.0, "linear", 2.5)),
        (LLAMA3_SCALING, LLAMA3),
    ],
)
def test_rope_forms(tmp_path: Path, form: str, scaling: dict[str, Any] | None, expected: RopeConfig) -> None:
    write(tmp_path, rope_theta=500000.0, rope_scaling=scaling, rope_form=form)
    assert read_config(tmp_path).rope == expected


def test_rope_mixtures(tmp_path: Path) -> None:
    path = write(tmp_path, rope_theta=500000.0) / "config.json"
    edit_json(path, rope_scaling={"type": "linear", "factor": 4})
    assert read_config(tmp_path).rope == RopeConfig(500000.0, "linear", 4.0)
    edit_json(path, rope_scaling=LLAMA3_SCALING, rope_parameters={"rope_theta": 500000.0, **LLAMA3_SCALING})
    assert read_config(tmp_path).rope == LLAMA3
    edit_json(path, rope_parameters={"rope_theta": 10000.0, **LLAMA3_SCALING})
    assert "rope_parameters and rope_scaling disagree" in refusal(tmp_path)


def test_the_length_before_scaling_may_stand_outside(tmp_path: Path) -> None:
    path = write(tmp_path, rope_theta=500000.0, rope_scaling={**LLAMA3_SCALING, "original_max_position_embeddings": 8})
    edit_json(path / "config.json", original_max_position_embeddings=64)
    assert read_config(tmp_path).rope == LLAMA3
    edit_json(path / "config.json", original_max_position_embeddings="64")
    assert "original_max_position_embeddings is 64; it must be an integer" in refusal(tmp_path)


@pytest.mark.parametrize("form", ["old", "new"])
def test_c01_unknown_rope_type(tmp_path: Path, form: str) -> None:
    write(tmp_path, rope_scaling={**LLAMA3_SCALING, "rope_type": "foo"}, rope_form=form)
    assert "RoPE type foo is not supported" in refusal(tmp_path)


@pytest.mark.parametrize("section", [{"factor": 4.0}, {"full_attention": {"rope_type": "linear", "factor": 8.0}}])
def test_scaling_without_a_type_is_refused(tmp_path: Path, section: dict[str, Any]) -> None:
    edit_json(write(tmp_path) / "config.json", rope_scaling=section)
    assert f"rope_scaling has {next(iter(section))}, but no rope_type" in refusal(tmp_path)


def test_another_model_type_is_refused(tmp_path: Path) -> None:
    """transformers goes by it: Gemma's embeddings and norms would be computed wrongly."""
    edit_json(write(tmp_path) / "config.json", model_type="gemma")
    assert "LlamaForCausalLM with model_type gemma is not supported" in refusal(tmp_path)


def test_llama3_settings_must_be_there(tmp_path: Path) -> None:
    write(tmp_path, rope_scaling={"rope_type": "llama3", "factor": 32.0})
    message = refusal(tmp_path)
    for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        assert f"rope_scaling.{key} is missing" in message
    write(tmp_path, rope_scaling={**LLAMA3_SCALING, "low_freq_factor": 4.0})
    assert "not below high_freq_factor" in refusal(tmp_path)


# --- refusals --------------------------------------------------------------------------------------------------------

UNSUPPORTED = {
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "gelu",
    "sliding_window": 4096,
    "quantization_config": {"quant_method": "gptq"},
    "partial_rotary_factor": 0.5,
    "logits_scaling": 8.0,
    "torch_dtype": "float8_e4m3fn",
}


def test_a_window_that_is_not_used(tmp_path: Path) -> None:
    edit_json(write(tmp_path) / "config.json", sliding_window=4096, use_sliding_window=False, max_window_layers=28)
    read_config(tmp_path)


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_unsupported_settings_are_refused_by_name(tmp_path: Path, key: str) -> None:
    edit_json(write(tmp_path) / "config.json", **{key: UNSUPPORTED[key]})
    config, faults = scan_config(tmp_path)
    assert config is None
    assert [fault.unsupported for fault in faults] == [True]
    assert key.removeprefix("torch_") in refusal(tmp_path)


@pytest.mark.parametrize(
    "names", [["MistralForCausalLM"], ["LlamaForCausalLM", "Other"], [], "LlamaForCausalLM", None, 3]
)
def test_other_architectures(tmp_path: Path, names: Any) -> None:
    edit_json(write(tmp_path) / "config.json", architectures=names, model_type="other", hidden_size=...)
    message = refusal(tmp_path)
    assert "architecture" in message
    assert "hidden_size" not in message  # the other keys of a foreign architecture mean nothing to us


WRONG = [
    ("hidden_size", 0),
    ("hidden_size", -4),
    ("hidden_size", 2**40),
    ("hidden_size", "256"),
    ("hidden_size", ...),
    ("num_hidden_layers", 10**6),
    ("num_attention_heads", True),
    ("num_attention_heads", 3),
    ("num_key_value_heads", 3),
    ("head_dim", 63),
    ("vocab_size", None),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", "1e-5"),
    ("rope_theta", -1),
    ("tie_word_embeddings", "yes"),
    ("bos_token_id", -1),
    ("eos_token_id", "2"),
    ("eos_token_id", [1, None]),
    ("rope_scaling", "llama3"),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_wrong_values(tmp_path: Path, key: str, value: Any) -> None:
    edit_json(write(tmp_path) / "config.json", **{key: value})
    assert key in refusal(tmp_path)
    assert not any(fault.unsupported for fault in scan_config(tmp_path)[1])


def test_all_wrong_values_are_listed(tmp_path: Path) -> None:
    edit_json(write(tmp_path) / "config.json", hidden_size=None, vocab_size=-1, attention_bias=True)
    message = refusal(tmp_path)
    assert "3 faults" in message
    assert all(key in message for key in ("hidden_size", "vocab_size", "attention_bias"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": 1, "a": 2}', "the key a occurs twice"),
        (b"\xff", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_broken_json(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert message in refusal(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path)


# --- EOS -------------------------------------------------------------------------------------------------------------


def test_c03_eos_is_a_union(tmp_path: Path) -> None:
    write(tmp_path, eos=EOS)
    assert read_config(tmp_path).eos_token_ids == (EOS,)
    edit_json(tmp_path / "generation_config.json", eos_token_id=[EOT, EOS], temperature=0.6)
    config = read_config(tmp_path)
    assert config.eos_token_ids == (EOS, EOT)
    assert config.generation["temperature"] == 0.6
    (tmp_path / "generation_config.json").unlink()
    write_byte_tokenizer(tmp_path, eos="<eot>")
    assert read_config(tmp_path).eos_token_ids == (EOS, EOT)
    write_byte_tokenizer(tmp_path, eos=None)
    assert read_config(tmp_path).eos_token_ids == (EOS,)


def test_eos_in_every_form_of_the_tokenizer_files(tmp_path: Path) -> None:
    write(tmp_path, eos=None)
    path = write_byte_tokenizer(tmp_path) / "tokenizer_config.json"
    edit_json(path, eos_token={"content": "<eot>", "special": True})
    assert read_config(tmp_path).eos_token_ids == (EOT,)
    edit_json(path, eos_token="<end>", added_tokens_decoder={"7": {"content": "<end>"}})
    assert read_config(tmp_path).eos_token_ids == (7,)
    edit_json(path, eos_token="A")  # no added token, only in the vocabulary
    assert read_config(tmp_path).eos_token_ids == (65,)
    backend = (tmp_path / "tokenizer.json").read_text()
    edit_json(tmp_path / "tokenizer.json", model={"type": "Unigram", "vocab": [["<unk>", 0.0], ["A", -1.5]]})
    assert read_config(tmp_path).eos_token_ids == (1,)
    (tmp_path / "tokenizer.json").write_text(backend)
    edit_json(path, eos_token="unknown")
    assert read_config(tmp_path).eos_token_ids == ()
    edit_json(path, eos_token=...)
    edit_json(tmp_path / "special_tokens_map.json", eos_token="<eos>")
    assert read_config(tmp_path).eos_token_ids == (EOS,)
    edit_json(path, eos_token=5)
    with pytest.raises(UserError, match="eos_token is 5"):
        read_config(tmp_path)
