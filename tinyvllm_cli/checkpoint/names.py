"""From the checkpoint's names to ours: which stored tensors make up which weight, and where it lies in the arena."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tinyvllm_cli.checkpoint.config import ARCHITECTURE, ModelConfig
from tinyvllm_cli.checkpoint.faults import Fault, quote, raise_any
from tinyvllm_cli.checkpoint.header import TensorInfo
from tinyvllm_cli.checkpoint.index import ROPE_TABLES, Checkpoint

EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
ALIGNMENT = 256
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes that weights may be stored in."""

_HARMLESS = re.compile(rf"{ROPE_TABLES}|v_head\.summary\.(weight|bias)")
"""Left-over tensors without which the text is the same: tables that RoPE's settings determine, TRL's value head."""
_KINDS = (
    (
        re.compile(r".*\.lora_[AB]\..*"),
        "these are the weights of a LoRA adapter, not of a model",
        "Merge the adapter into its base model first (merge_and_unload of peft).",
    ),
    (
        re.compile(r".*\.(qweight|qzeros|scales|weight_packed|weight_scale|weight_scale_inv|weight\.absmax|SCB)"),
        "the weights are quantised, which is not supported",
        f"Give the model in {', '.join(STORED_DTYPES.values())}.",
    ),
)
"""What names tell of a checkpoint that is not what is wanted; more than a list of what is missing."""
PROBE_BYTES = 1 << 16
_CHUNK = 1 << 24


class WeightSlot(NamedTuple):
    """A weight in the arena: `shape` in elements, `offset` and `nbytes` in bytes."""

    name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Where every weight comes from.

    Attributes:
        sources: name of a weight ("embed", "layers.0.qkv", ...) to the stored tensors that are stacked in it, in order.
        data_starts: offset in each file where its data section begins.
        tied: lm_head is the embedding matrix.
        dtype: "float32", "bfloat16" or "float16": what most bytes are stored in.
        warnings: what the user should know, one sentence each.
    """

    sources: dict[str, tuple[TensorInfo, ...]]
    data_starts: dict[Path, int]
    tied: bool
    dtype: str
    warnings: tuple[str, ...] = ()


def weights_layout(config: ModelConfig, itemsize: int, tied: bool | None = None) -> tuple[list[WeightSlot], int]:
    """The arena: every weight at a multiple of 256 bytes, and the arena's size. tied: as config says, unless given."""
    slots, offset = [], 0
    for name, parts in stored_weights(config, config.tie_word_embeddings if tied is None else tied):
        shape = (sum(shape[0] for _, shape in parts), *parts[0][1][1:])
        nbytes = itemsize * shape[0] * (shape[1] if len(shape) > 1 else 1)
        slots.append(WeightSlot(name, shape, offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return slots, offset


def map_weights(config: ModelConfig, checkpoint: Checkpoint) -> WeightMap:
    """Checks presence, shape and dtype of every tensor and that none is left over. UserError lists every fault."""
    weight_map, faults = scan_weights(config, checkpoint)
    raise_any(faults)
    assert weight_map is not None
    return weight_map


def scan_weights(
    config: ModelConfig, checkpoint: Checkpoint, *, probe: bool = False
) -> tuple[WeightMap | None, list[Fault]]:
    """The map (None when there are faults) and all faults.

    probe: when both matrices of a tied pair are stored, compare only their ends, not all their bytes.
    """
    where = quote(str(checkpoint.index or (checkpoint.files[0].path if len(checkpoint.files) == 1 else "")), 4096)
    tensors = checkpoint.tensors
    faults: list[Fault] = []
    tied, warnings = config.tie_word_embeddings, []
    if tied and LM_HEAD in tensors and EMBED not in tensors:  # one matrix, kept under its other name
        tensors = {**tensors, EMBED: tensors[LM_HEAD]}
    elif tied and LM_HEAD in tensors:
        tied = _same_bytes(checkpoint, tensors[EMBED], tensors[LM_HEAD], probe)
        if not tied:
            warnings.append(
                f"config.json ties the embeddings, but {LM_HEAD} differs from {EMBED}: {LM_HEAD} is used for the logits"
            )
    if (checkpoint.folder / "adapter_config.json").exists():
        warnings.append("there is an adapter beside the model, adapter_config.json: it is not applied")
    sources: dict[str, tuple[TensorInfo, ...]] = {}
    for name, parts in stored_weights(config, tied):
        found = [tensors.get(part) for part, _ in parts]
        sources[name] = tuple(tensor for tensor in found if tensor is not None)
        for (part, shape), tensor in zip(parts, found, strict=True):
            fault = _fault(where, part, shape, tensor, config)
            if fault:
                faults.append(fault)
    known = {tensor.name for group in sources.values() for tensor in group} | ({LM_HEAD} if tied else set())
    for name, tensor in checkpoint.tensors.items():
        if name not in known and not _HARMLESS.fullmatch(name):
            what = f"tensor {quote(name)} {list(tensor.shape)} has no place in a {config.architecture}"
            faults.append(Fault(quote(str(tensor.file), 4096), f"{what} of {config.num_layers} layers"))
    if faults:
        return None, [*_kind(checkpoint, where), *faults]
    sizes: Counter[str] = Counter()
    for group in sources.values():
        for tensor in group:
            sizes[tensor.dtype] += tensor.nbytes
    data_starts = {header.path: header.data_start for header in checkpoint.files}
    dtype = STORED_DTYPES[sizes.most_common(1)[0][0]]
    return WeightMap(sources, data_starts, tied, dtype, tuple(warnings)), []


def _kind(checkpoint: Checkpoint, where: str) -> Iterator[Fault]:
    """What a checkpoint with faults is instead, as far as its names tell."""
    for pattern, what, fix in _KINDS:
        example = next((name for name in checkpoint.tensors if pattern.fullmatch(name)), None)
        if example is not None:
            yield Fault(where, f"{what}: there is {quote(example)}", fix, unsupported=True)
            return
    others = checkpoint.tensors.keys() - {LM_HEAD}
    if others and not any(name.startswith("model.layers.") for name in others):
        what = f"the tensors have other names than those of a {ARCHITECTURE}, such as {quote(min(others))}"
        fix = f"Convert the checkpoint: {EMBED}, model.layers.0.self_attn.q_proj.weight and so on are expected."
        yield Fault(where, what, fix)


Part = tuple[str, tuple[int, ...]]


def stored_weights(config: ModelConfig, tied: bool) -> Iterator[tuple[str, list[Part]]]:
    """Every weight with the names and shapes of the stored tensors that it stacks, in the arena's order."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "embed", [(EMBED, (vocab, hidden))]
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        yield ours + "attn_norm", [(theirs + "input_layernorm.weight", (hidden,))]
        yield (
            ours + "qkv",
            [
                (attention + "q_proj.weight", (q_size, hidden)),
                (attention + "k_proj.weight", (kv_size, hidden)),
                (attention + "v_proj.weight", (kv_size, hidden)),
            ],
        )
        yield ours + "o", [(attention + "o_proj.weight", (hidden, q_size))]
        yield ours + "mlp_norm", [(theirs + "post_attention_layernorm.weight", (hidden,))]
        yield (
            ours + "gate_up",
            [(mlp + "gate_proj.weight", (inner, hidden)), (mlp + "up_proj.weight", (inner, hidden))],
        )
        yield ours + "down", [(mlp + "down_proj.weight", (hidden, inner))]
    yield "final_norm", [("model.norm.weight", (hidden,))]
    if not tied:
        yield "lm_head", [(LM_HEAD, (vocab, hidden))]


def _fault(
    where: str, name: str, shape: tuple[int, ...], tensor: TensorInfo | None, config: ModelConfig
) -> Fault | None:
    """What is wrong with one expected tensor."""
    if tensor is None:
        fix = ""
        if name == LM_HEAD:
            fix = "config.json says tie_word_embeddings false; if the embeddings are tied, it must say true."
        return Fault(where, f"tensor {name} {list(shape)} is missing", fix)
    where, name = quote(str(tensor.file), 4096), tensor.name
    if tensor.shape != shape:
        return Fault(where, f"tensor {name} has shape {list(tensor.shape)}; config.json makes it {list(shape)}")
    if tensor.dtype not in STORED_DTYPES:
        supported = f"Supported: {', '.join(STORED_DTYPES)}."
        return Fault(where, f"tensor {name} is {tensor.dtype}, which is not supported", supported, unsupported=True)
    return None


def _same_bytes(checkpoint: Checkpoint, a: TensorInfo, b: TensorInfo, probe: bool) -> bool:
    """Whether two stored tensors are equal in dtype, shape and bytes; with `probe` only the ends are compared."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    size = a.nbytes
    begins = [0, max(size - PROBE_BYTES, 0)] if probe else range(0, size, _CHUNK)
    step = PROBE_BYTES if probe else _CHUNK
    with open(a.file, "rb") as file_a, open(b.file, "rb") as file_b:
        start_a, start_b = checkpoint.data_start(a.file) + a.begin, checkpoint.data_start(b.file) + b.begin
        for begin in begins:
            file_a.seek(start_a + begin)
            file_b.seek(start_b + begin)
            length = min(step, size - begin)
            if file_a.read(length) != file_b.read(length):
                return False
    return True
