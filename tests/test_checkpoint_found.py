"""Checkpoints as other programs leave them: they are read if that can be done rightly, else named for what they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from files import edit_json, write_tensors
from models import llama_config, rand_tensors, write_rand
from test_checkpoint_files import SHARD_2, load, refusal, retarget

from tinyvllm_cli.checkpoint.config import read_config
from tinyvllm_cli.checkpoint.index import open_checkpoint
from tinyvllm_cli.checkpoint.names import map_weights
from tinyvllm_cli.commands import inspect


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    """save_pretrained over a sharded model removes the shards and leaves the index."""
    folder, single = write_rand(tmp_path / "m", num_shards=3), write_rand(tmp_path / "single", seed=1)
    (folder / "model.safetensors").write_bytes((single / "model.safetensors").read_bytes())
    assert torch.equal(load(folder).arena, load(single).arena)
    assert len(open_checkpoint(folder).ignored_files) == 3
    (folder / SHARD_2).unlink()
    assert torch.equal(load(folder).arena, load(single).arena)


def test_an_index_of_a_converted_model(tmp_path: Path) -> None:
    """It names what the conversion has dropped: the second of a tied pair, tables of RoPE."""
    folder = write_rand(tmp_path / "m", num_shards=3, tied_variant="tied")
    whole = load(folder).arena
    for name in ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"):
        retarget(folder, name, SHARD_2)
    assert torch.equal(load(folder).arena, whole)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    assert "tensor lm_head.weight [300, 256] is missing" in refusal(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("_proj.weight", "_proj.qweight", "the weights are quantised, which is not supported: there is"),
        ("_proj.weight", "_proj.lora_A.weight", "a LoRA adapter, not of a model: there is"),
        ("model.", "", "other names than those of a LlamaForCausalLM, such as embed_tokens.weight"),
        (
            "model.",
            "module.model.",
            "other names than those of a LlamaForCausalLM, such as module.model.embed_tokens.weight",
        ),
    ],
)
def test_what_it_is_instead(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Told first: a long list of what is missing would hide it."""
    folder = write_rand(tmp_path / "m")
    tensors = {name.replace(old, new): array for name, array in rand_tensors(llama_config()).items()}
    write_tensors(folder / "model.safetensors", tensors)
    assert message in refusal(folder).splitlines()[1]


def test_a_tied_matrix_under_its_other_name(tmp_path: Path) -> None:
    """accelerate and safetensors' save_model keep the first of two names in the alphabet."""
    folder, usual = write_rand(tmp_path / "m", tied_variant="tied"), write_rand(tmp_path / "usual", tied_variant="tied")
    tensors = rand_tensors(llama_config(tied=True), tied_variant="tied")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write_tensors(folder / "model.safetensors", tensors)
    weights = load(folder)
    assert torch.equal(weights.arena, load(usual).arena)
    assert weights.lm_head is weights.embed
    totals = [inspect.run(inspect.InspectOptions(path, device="cpu")).totals.all for path in (folder, usual)]
    assert totals[0] == totals[1]
    edit_json(folder / "config.json", vocab_size=301)
    assert "tensor lm_head.weight has shape [300, 256]" in refusal(folder)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    assert "tensor model.embed_tokens.weight [301, 256] is missing" in refusal(folder)


def test_a_value_head_is_left_out(tmp_path: Path) -> None:
    """TRL trains one beside the model and saves both together."""
    folder = write_rand(tmp_path / "m")
    whole, tensors = load(folder).arena, rand_tensors(llama_config())
    tensors |= {"v_head.summary.weight": tensors["lm_head.weight"][:1], "v_head.summary.bias": np.zeros(1)}
    write_tensors(folder / "model.safetensors", tensors)
    assert torch.equal(load(folder).arena, whole)


def test_an_adapter_beside_the_model_is_told_of(tmp_path: Path) -> None:
    """transformers applies it where peft is installed."""
    folder = write_rand(tmp_path / "m")
    assert not map_weights(read_config(folder), open_checkpoint(folder)).warnings
    edit_json(folder / "adapter_config.json", peft_type="LORA")
    assert "it is not applied" in map_weights(read_config(folder), open_checkpoint(folder)).warnings[0]
