"""Synthetic checkpoints: RAND, CHAIN and DICE models and the BYTE tokenizer. Import as `from models import ...`.

`files` writes the files themselves, right or wrong.

Nothing here needs torch but `oracle`. Arrays are numpy fp32 and become bf16, fp16 or fp32 when they are written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from files import Tensors, write_shards
from files import edit_json as edit_json

BOS, EOS, EOT, PAD = 256, 257, 258, 259
"""Ids of the special tokens of the BYTE tokenizer; every byte's token has the byte's value as its id."""
SPECIAL_TOKENS = {"<bos>": BOS, "<eos>": EOS, "<eot>": EOT, "<pad>": PAD}
BYTE_VOCAB_SIZE = 260

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def token_id(token: str | int) -> int:
    """Id of a special token's name, of a single byte written as a character, or of an id given as it is."""
    if isinstance(token, int):
        return token
    return SPECIAL_TOKENS[token] if token in SPECIAL_TOKENS else ord(token)


# --- tokenizer -------------------------------------------------------------------------------------------------------


def write_byte_tokenizer(
    folder: Path,
    *,
    add_bos: bool = True,
    chat_template: str | list[dict[str, str]] | None = None,
    chat_template_file: bool = False,
    eos: str | None = "<eos>",
) -> Path:
    """Writes the BYTE tokenizer: tokenizer.json, tokenizer_config.json and perhaps chat_template.jinja.

    Args:
        add_bos: whether the post-processor puts `<bos>` in front.
        chat_template: template, or a list of {"name", "template"}; None for a model without one. See `CHAT_TEMPLATE`.
        chat_template_file: put the template into chat_template.jinja instead of tokenizer_config.json.
        eos: eos_token of tokenizer_config.json, or None to leave it out.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=dict(zip(_byte_alphabet(), range(256), strict=True)), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    if eos is not None:
        config["eos_token"] = eos
    if chat_template is not None and chat_template_file:
        assert isinstance(chat_template, str)
        (folder / "chat_template.jinja").write_text(chat_template)
    elif chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE vocabularies: itself if visible, else 256, 257, ..."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, hidden = [], 0
    for byte in range(256):
        alphabet.append(chr(byte) if byte in visible else chr(256 + hidden))
        hidden += byte not in visible
    return alphabet


# --- models ----------------------------------------------------------------------------------------------------------

TIED_VARIANTS = ("untied", "tied", "tied_copy", "tied_different", "untied_missing")
"""Untied; C02 a: tied, no lm_head; b: tied, identical copy; c: tied, different lm_head; d: untied, lm_head absent."""


def llama_config(
    *,
    hidden: int = 256,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 512,
    vocab: int = 300,
    max_position: int = 512,
    tied: bool = False,
    dtype: str = "float32",
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_form: str = "old",
    eos: int | list[int] | None = EOS,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A config.json. rope_form: "old" (rope_theta, rope_scaling) or "new" (rope_parameters); extra: keys to add.

    head_dim None means hidden / heads and leaves the key out. `transformers` wants hidden to be a multiple of heads
    (for a GQA ratio of 3: heads 6, kv_heads 2, hidden 384).
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_position,
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "vocab_size": vocab,
        "bos_token_id": BOS,
    }
    if head_dim is not None:
        config["head_dim"] = head_dim
    if eos is not None:
        config["eos_token_id"] = eos
    if rope_form == "new":
        scaling = {"rope_type": "default", **(rope_scaling or {})}
        config["rope_parameters"] = {"rope_theta": rope_theta, **scaling}
        config["dtype"] = dtype
    else:
        config["rope_theta"] = rope_theta
        config["rope_scaling"] = dict(rope_scaling) if rope_scaling else None
        config["torch_dtype"] = dtype
    return config | dict(extra or {})


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""The rope_scaling of C01; its rope_theta is 500000."""


def rand_tensors(
    config: Mapping[str, Any], *, seed: int = 0, tied_variant: str = "untied", head_std: float = 0.3
) -> Tensors:
    """Seeded normal weights of the RAND model: std 0.05, norms 1 + 0.05 x, lm_head `head_std`.

    A tied matrix keeps 0.05 (more, and each token would only repeat itself); the final norm is scaled instead.
    """
    rng = np.random.default_rng(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def normal(*shape: int, std: float = 0.05) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    def norm() -> npt.NDArray[np.float32]:
        return np.float32(1.0) + normal(hidden)

    tied = tied_variant.startswith("tied")
    tensors: Tensors = {"model.embed_tokens.weight": normal(vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = norm()
        tensors[prefix + "self_attn.q_proj.weight"] = normal(q_size, hidden)
        tensors[prefix + "self_attn.k_proj.weight"] = normal(kv_size, hidden)
        tensors[prefix + "self_attn.v_proj.weight"] = normal(kv_size, hidden)
        tensors[prefix + "self_attn.o_proj.weight"] = normal(hidden, q_size)
        tensors[prefix + "post_attention_layernorm.weight"] = norm()
        tensors[prefix + "mlp.gate_proj.weight"] = normal(inner, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = normal(inner, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = normal(hidden, inner)
    tensors["model.norm.weight"] = norm() * np.float32(head_std / 0.05 if tied else 1.0)
    if tied_variant == "tied_copy":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    elif tied_variant in ("untied", "tied_different"):
        tensors["lm_head.weight"] = normal(vocab, hidden, std=head_std)
    return tensors


def write_rand(
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    head_std: float = 0.3,
    tied_variant: str = "untied",
    num_shards: int = 1,
    eos: int | list[int] | None = EOS,
    generation_eos: int | list[int] | None = None,
    tokenizer: bool = True,
    add_bos: bool = True,
    chat_template: str | list[dict[str, str]] | None = None,
    tokenizer_eos: str | None = "<eos>",
    **config_options: Any,
) -> Path:
    """Writes a RAND model folder and returns it. `config_options` are those of `llama_config`.

    Args:
        tied_variant: one of `TIED_VARIANTS`.
        eos: eos_token_id of config.json; generation_eos: that of generation_config.json (None: no such file);
            tokenizer_eos: eos_token of tokenizer_config.json.
        tokenizer: also write the BYTE tokenizer (260 tokens of the 300; ids above are unused by text).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tied = tied_variant.startswith("tied")
    config = llama_config(tied=tied, dtype=dtype, eos=eos, **config_options)
    tensors = rand_tensors(config, seed=seed, tied_variant=tied_variant, head_std=head_std)
    write_shards(folder, tensors, dtype, num_shards)
    _write_companions(folder, config, generation_eos, tokenizer, add_bos, chat_template, tokenizer_eos)
    return folder


def chain(*tokens: str | int) -> dict[int, int]:
    """`next` of a CHAIN model from a path: chain("A", "B", "<eot>", 67) is A→B→<eot>→C. May end where it began."""
    ids = [token_id(token) for token in tokens]
    return dict(pairwise(ids))


def byte_chain(text: str, start: str = "A", end: str = "<eos>") -> dict[int, int]:
    """`next` of a CHAIN model that says `text` after the byte `start` and ends with `end`; bytes must not repeat."""
    path = [token_id(start), *text.encode(), token_id(end)]
    assert len(set(path)) == len(path), "a byte may occur only once in a chain"
    return chain(*path)


def write_chain(
    folder: Path,
    next_token: Mapping[int, int],
    *,
    dice: Mapping[int, Mapping[int, float]] | None = None,
    dtype: str = "float32",
    default_next: int = EOS,
    eos: int | list[int] | None = EOS,
    generation_eos: int | list[int] | None = None,
    tokenizer: bool = True,
    add_bos: bool = True,
    chat_template: str | list[dict[str, str]] | None = None,
    tokenizer_eos: str | None = "<eos>",
    **config_options: Any,
) -> Path:
    """Writes a CHAIN model folder: after token t comes next_token[t] (else `default_next`), with logit 22.6 against 0.

    Args:
        dice: for a DICE model, token -> {token: probability}; its next token is drawn with exactly these odds.
        The other arguments are those of `write_rand`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape = {"hidden": 512, "layers": 1, "heads": 8, "kv_heads": 2, "intermediate": 512, "vocab": BYTE_VOCAB_SIZE}
    config = llama_config(dtype=dtype, eos=eos, **{**shape, **config_options})
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = rand_tensors(config)
    for name, array in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            array[:] = 0.0
        elif "norm" in name:
            array[:] = 1.0
    tensors["model.embed_tokens.weight"] = 8.0 * np.eye(vocab, hidden, dtype=np.float32)
    lm_head = np.zeros((vocab, hidden), dtype=np.float32)
    for token in range(vocab):
        if dice and token in dice:
            for following, probability in dice[token].items():
                lm_head[following, token] = (math.log(probability) + 20.0) / math.sqrt(hidden)
        else:
            lm_head[next_token.get(token, default_next), token] = 1.0
    tensors["lm_head.weight"] = lm_head
    write_shards(folder, tensors, dtype)
    _write_companions(folder, config, generation_eos, tokenizer, add_bos, chat_template, tokenizer_eos)
    return folder


def _write_companions(
    folder: Path,
    config: Mapping[str, Any],
    generation_eos: int | list[int] | None,
    tokenizer: bool,
    add_bos: bool,
    chat_template: str | list[dict[str, str]] | None,
    tokenizer_eos: str | None,
) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    if generation_eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    if tokenizer:
        write_byte_tokenizer(folder, add_bos=add_bos, chat_template=chat_template, eos=tokenizer_eos)


# --- oracle ----------------------------------------------------------------------------------------------------------


def oracle(
    folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int, dtype: str = "float32"
) -> tuple[list[list[int]], float]:
    """Greedy tokens of `transformers` on the CPU, each prompt alone, ignoring EOS, and the smallest top-2 logit gap.

    A seed is fit to compare tokens only when the gap is wide against rounding (fp32: above 0.005): look for one.
    """
    outputs, gaps = oracle_steps(folder, prompts, num_tokens, dtype)
    return outputs, min(min(row) for row in gaps)


def oracle_steps(
    folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int, dtype: str = "float32"
) -> tuple[list[list[int]], list[list[float]]]:
    """As `oracle`, with the top-2 logit gap of every step of every prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": num_tokens, "output_logits": True, "return_dict_in_generate": True}
    outputs, gaps = [], []
    for prompt in prompts:
        result = model.generate(torch.tensor([list(prompt)]), **options)
        outputs.append(result.sequences[0, len(prompt) :].tolist())
        best = torch.cat(result.logits).float().topk(2).values
        gaps.append((best[:, 0] - best[:, 1]).tolist())
    return outputs, gaps
