"""config.json and its companions as one frozen ModelConfig; what tinyvllm would get wrong is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinyvllm_cli.checkpoint.eos import eos_token_ids
from tinyvllm_cli.checkpoint.faults import Fault, is_int, is_token_id, quote, raise_any
from tinyvllm_cli.checkpoint.json_file import read_json

ARCHITECTURE = "LlamaForCausalLM"
RopeKind = Literal["default", "linear", "llama3"]
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 4096
DTYPES = ("float32", "bfloat16", "float16")
CUDA_HEAD_DIMS = (64, 128)

HARMLESS = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", "swish", None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "partial_rotary_factor": (1, None),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "attention_multiplier": (None,),
    "logits_scaling": (1, None),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "use_qk_norm": (False, None),
    "num_local_experts": (0, None),
    "is_encoder_decoder": (False, None),
}
"""Settings that change results, and the values with which they do not. Any other value is refused."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embeddings: base `theta`, and how frequencies are scaled ("linear": factor; "llama3": all)."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama model's configuration.

    Attributes:
        max_position_embeddings: tokens that the model was made for.
        eos_token_ids: union of config.json, generation_config.json and the tokenizer's files, ascending.
        dtype: "float32", "bfloat16" or "float16", as config.json says; float32 when it does not.
        generation: what else generation_config.json recommends, such as temperature.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    architecture: str = ARCHITECTURE
    generation: Mapping[str, Any] = field(default_factory=dict)


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a model folder. UserError that lists every fault and every unsupported setting."""
    config, faults = scan_config(folder)
    raise_any(faults)
    assert config is not None
    return config


def cuda_faults(config: ModelConfig, dtype: str) -> list[Fault]:
    """What keeps a model that the CPU can run from running on CUDA in `dtype` ("auto": one that fits)."""
    faults = []
    if config.head_dim not in CUDA_HEAD_DIMS:
        what = f"head_dim {config.head_dim} is not supported by the CUDA kernels (64 and 128 are)"
        faults.append(Fault("", what, "Use --device cpu.", unsupported=True))
    if dtype == "float32":
        what = "the CUDA kernels compute in bfloat16 or float16, not float32"
        faults.append(Fault("--dtype", what, "Use another --dtype, or --device cpu.", unsupported=True))
    return faults


def scan_config(folder: Path) -> tuple[ModelConfig | None, list[Fault]]:
    """The configuration (None when it cannot be trusted) and all faults, unsupported settings marked as such."""
    path = folder / "config.json"
    content, faults = read_json(path)
    if faults:
        return None, faults
    reader = _Reader(quote(str(path), 4096), content)
    _refuse_unsupported(reader)
    if any(fault.unsupported and fault.what.startswith("architecture") for fault in reader.faults):
        return None, reader.faults  # its other keys may mean anything
    generation, faults = _generation_config(folder)
    reader.faults += faults
    tokens, faults = eos_token_ids(folder, content, generation)
    reader.faults += faults
    config = _model_config(reader, tokens, generation)
    return (None if reader.faults else config), reader.faults


class _Reader:
    """Typed access to a JSON object; whatever is not as it should be becomes a fault."""

    def __init__(self, where: str, content: Mapping[str, Any], prefix: str = "") -> None:
        self.where = where
        self.content = content
        self.prefix = prefix
        self.faults: list[Fault] = []

    def fault(self, what: str) -> None:
        self.faults.append(Fault(self.where, what))

    def unsupported(self, what: str, fix: str = "") -> None:
        self.faults.append(Fault(self.where, what, fix, unsupported=True))

    def integer(self, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """A positive integer; without a default the key must be there."""
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if is_int(value) and 1 <= value <= limit:
            return int(value)
        self._wrong(key, value, f"an integer from 1 to {limit:,}")
        return 1

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """A finite number above `least`."""
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if (is_int(value) and abs(value) < 2**63) or isinstance(value, float):
            number = float(value)
            if math.isfinite(number) and number > least:
                return number
        self._wrong(key, value, f"a number above {least:g}")
        return 1.0

    def boolean(self, key: str, default: bool) -> bool:
        value = self.content.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._wrong(key, value, "true or false")
        return bool(value)

    def _wrong(self, key: str, value: Any, wanted: str) -> None:
        if value is None:
            self.fault(f"{self.prefix}{key} is missing; it must be {wanted}")
        else:
            self.fault(f"{self.prefix}{key} is {quote(value)}; it must be {wanted}")


def _refuse_unsupported(reader: _Reader) -> None:
    content = reader.content
    names, model_type = content.get("architectures"), content.get("model_type")
    if names is None and model_type == "llama":
        names = [ARCHITECTURE]
    if names != [ARCHITECTURE] or model_type not in (None, "llama"):
        name = names[0] if isinstance(names, list) and len(names) == 1 else names
        kind = quote(name) if names is not None else f"of model_type {quote(model_type)}"
        if names == [ARCHITECTURE]:
            kind += f" with model_type {quote(model_type)}"
        reader.unsupported(f"architecture {kind} is not supported", f"tinyvllm runs {ARCHITECTURE}.")
        return
    for key, harmless in HARMLESS.items():
        if key == "sliding_window" and content.get("use_sliding_window") is False:
            continue
        value = content.get(key)
        if not any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in harmless):
            shown = quote(value.get("quant_method", "set")) if isinstance(value, dict) else quote(value)
            reader.unsupported(f"{key} {shown} is not supported")


def _model_config(reader: _Reader, tokens: tuple[int, ...], generation: Mapping[str, Any]) -> ModelConfig:
    content = reader.content
    before = len(reader.faults)
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", default=heads)
    if len(reader.faults) == before:
        if heads % kv_heads:
            reader.fault(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        if content.get("head_dim") is None and hidden % heads:
            reader.fault(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is missing")
    head_dim = reader.integer("head_dim", default=max(hidden // heads, 1), limit=65536)
    if head_dim % 2 and len(reader.faults) == before:
        reader.fault(f"head_dim is {head_dim}; rotary embeddings need an even number")
    max_position = reader.integer("max_position_embeddings", default=2048)
    return ModelConfig(
        hidden_size=hidden,
        num_layers=reader.integer("num_hidden_layers", limit=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=reader.integer("intermediate_size"),
        vocab_size=reader.integer("vocab_size"),
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-6),
        rope=_rope_config(reader),
        max_position_embeddings=max_position,
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=False),
        bos_token_id=_token_id(reader, "bos_token_id"),
        eos_token_ids=tokens,
        dtype=_dtype(reader),
        generation=generation,
    )


def _rope_config(reader: _Reader) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    content = reader.content
    sections = {key: content[key] for key in ("rope_parameters", "rope_scaling") if content.get(key) is not None}
    for key, section in sections.items():
        if not isinstance(section, dict):
            reader.fault(f"{key} is {quote(section)}; it must be an object")
            return RopeConfig()
    results = [_rope_section(reader, key, section) for key, section in sections.items()]
    if not results:
        return _rope_section(reader, "rope_theta", {})
    if results[0] != results[-1]:
        reader.fault("rope_parameters and rope_scaling disagree; one of them must go")
    return results[0]


def _rope_section(parent: _Reader, key: str, section: Mapping[str, Any]) -> RopeConfig:
    if "rope_theta" not in section:
        section = {**section, "rope_theta": parent.content.get("rope_theta")}
    reader = _Reader(parent.where, section, prefix=f"{key}." if key != "rope_theta" else "")
    extra = sorted(section.keys() - {"rope_theta", "partial_rotary_factor"})
    kind = section.get("rope_type", section.get("type", "default"))
    if extra and not section.keys() & {"rope_type", "type"}:
        reader.fault(f"{key} has {', '.join(map(quote, extra))}, but no rope_type")
    theta = reader.number("rope_theta", default=10000.0)
    rope = RopeConfig(theta)
    if kind == "linear":
        rope = RopeConfig(theta, "linear", reader.number("factor"))
    elif kind == "llama3":
        low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
        length = "original_max_position_embeddings"
        own = parent.content.get(length) is None  # else config.json itself has it, which goes first in transformers
        original = (reader if own else parent).integer(length)
        rope = RopeConfig(theta, "llama3", reader.number("factor"), low, high, original)
        if not reader.faults and low >= high:
            reader.fault(f"{key}: low_freq_factor {low:g} is not below high_freq_factor {high:g}")
    elif kind != "default":
        reader.unsupported(f"{key}: RoPE type {quote(kind)} is not supported", "Supported: default, linear, llama3.")
    if section.get("partial_rotary_factor") not in (None, 1):
        reader.unsupported(f"{key}: partial_rotary_factor {quote(section['partial_rotary_factor'])} is not supported")
    parent.faults += reader.faults
    return rope


def _token_id(reader: _Reader, key: str) -> int | None:
    value = reader.content.get(key)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None or is_token_id(value):
        return value
    reader.fault(f"{key} is {quote(value)}; it must be a token id")
    return None


def _dtype(reader: _Reader) -> str:
    value = reader.content.get("dtype", reader.content.get("torch_dtype"))
    if value is None:
        return "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    if name not in DTYPES:
        reader.unsupported(f"dtype {quote(value)} is not supported", f"Supported: {', '.join(DTYPES)}.")
    return name


def _generation_config(folder: Path) -> tuple[dict[str, Any], list[Fault]]:
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else ({}, [])
