"""Logits of a real shape against transformers on the same random weights: `python tests/check_logits.py [SHAPE]
[DEVICE]`.

fp32 transformers is the truth, its bf16 forward the measure: our error in prefill and at every tried batch of decode
may be at most twice that. For the GPU machine (Llama-3.2-1B by default), where no checkpoint of that size can be
carried.
"""

from __future__ import annotations

import sys

import torch

from tinyvllm_cli.bench.shapes import find_shape
from tinyvllm_cli.checkpoint.config import ModelConfig
from tinyvllm_cli.engine.sequence import SamplingParams
from tinyvllm_cli.llm import LLM

PROMPT, STEPS, BATCHES = 200, 8, (1, 3, 8, 9, 64)


def peer(config: ModelConfig, llm: LLM, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' Llama with the weights of `llm`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        rope |= {name: getattr(config.rope, name) for name in names}
    theirs = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters=rope,
    )
    weights = llm.runner.model.weights
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    state = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.final_norm}
    state["lm_head.weight"] = weights.lm_head
    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}."
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), layer.qkv.split((q, kv, kv)), strict=True))
        parts["o_proj"] = layer.o
        state |= {f"{at}self_attn.{name}.weight": value for name, value in parts.items()}
        gate, up = layer.gate_up.chunk(2)
        state |= {f"{at}mlp.{name}_proj.weight": w for name, w in (("gate", gate), ("up", up), ("down", layer.down))}
        state |= {
            f"{at}input_layernorm.weight": layer.attn_norm,
            f"{at}post_attention_layernorm.weight": layer.mlp_norm,
        }
    with torch.device(llm.device):
        model = LlamaForCausalLM(theirs)
    model.load_state_dict(state)
    return model.to(dtype).eval()


@torch.inference_mode()
def main(shape: str = "1B", device: str = "cuda") -> None:
    _, config = find_shape(shape)
    llm = LLM(
        config, device=device, dtype="bfloat16", max_model_len=1024, num_kv_blocks=2048, run_ahead=0, prefix_cache=False
    )
    prompt = torch.randint(0, 10000, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    found = {}
    for batch in BATCHES:
        rows = [llm.engine.add(prompt, SamplingParams(max_tokens=STEPS, ignore_eos=True)) for _ in range(batch)]
        llm.engine.step()
        found[f"prefill of {batch}"] = ([], llm.runner.buffers["logits"][0].cpu().clone())
        while llm.engine.has_work:
            llm.engine.step()
        answer = rows[0].output_token_ids
        found[f"decode of {batch}"] = (answer[:-1], llm.runner.buffers["logits"][0].cpu().clone())
    models = [peer(config, llm, dtype) for dtype in (torch.float32, torch.bfloat16)]
    worst = 0.0
    for name, (answer, logits) in found.items():
        ids = torch.tensor([prompt + answer], device=llm.device)
        exact, plain = (model(ids).logits[0, -1].float().cpu() for model in models)
        error, allowed = float((logits - exact).abs().max()), float((plain - exact).abs().max())
        worst = max(worst, error / allowed)
        print(f"{name:16} error {error:.4f}, torch's bf16 {allowed:.4f}, ratio {error / allowed:.2f}")
    sys.exit(0 if worst <= 2 else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
