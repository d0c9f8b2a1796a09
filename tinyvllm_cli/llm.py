"""LLM: a checkpoint made ready to run: weights loaded, memory planned, runner, scheduler and engine put together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import tinyvllm_cli.reference  # noqa: F401  (registers the CPU implementations)
from tinyvllm_cli.checkpoint.config import ModelConfig, cuda_faults, read_config
from tinyvllm_cli.checkpoint.faults import raise_any
from tinyvllm_cli.checkpoint.index import open_checkpoint
from tinyvllm_cli.checkpoint.names import map_weights, weights_layout
from tinyvllm_cli.checkpoint.weights import load_weights
from tinyvllm_cli.engine.blocks import BlockPool
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.engine.scheduler import Scheduler
from tinyvllm_cli.engine.sequence import LogitsError, SamplingParams
from tinyvllm_cli.errors import UserError
from tinyvllm_cli.generation import MAX_TOKENS, RequestOutput, Requests, recommended_sampling
from tinyvllm_cli.memory.budget import MEMORY_FRACTION, available_memory, cpu_kv_bytes, cuda_kv_bytes, pick_dtype
from tinyvllm_cli.memory.plan import KVPlan, default_limits, kv_block_bytes, plan_buffers, plan_kv_cache
from tinyvllm_cli.model.dummy import random_weights
from tinyvllm_cli.model.runner import ModelRunner
from tinyvllm_cli.text.chat import ChatTemplate
from tinyvllm_cli.text.encode import check_ids, encode_chat, encode_text
from tinyvllm_cli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tinyvllm_cli.checkpoint.weights import Weights

Progress = Callable[[str], None]
Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with "role" and "content"."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LLM:
    """A model ready to generate.

    Args:
        model: a Hugging Face folder, or "demo" for the bundled model; or a configuration, for random weights of that
            shape and no tokenizer.
        device: "auto" takes CUDA when it is there and works, else the CPU; "cuda" and "cpu" insist.
        dtype: "auto" is float32 on the CPU and the checkpoint's own on CUDA; or "float32", "bfloat16", "float16".
        max_num_seqs: sequences that run at once; default 256 on CUDA, 32 on the CPU.
        max_model_len: tokens of one sequence, prompt and output; default: what the model was made for.
        max_batched_tokens: tokens of one step; longer prompts are prefilled in chunks; default 8448, on the CPU 1024.
        block_size: tokens of one KV-cache block.
        num_kv_blocks, kv_cache_memory: size of the KV cache in blocks or bytes; default: `memory_fraction` of the
            device's memory less all else, on the CPU at most 4 GiB and half of what is free.
        graphs: capture steps in CUDA graphs, all but large ones that also decode.
        run_ahead: steps launched before the tokens of earlier ones are read; default 1 on CUDA, 0 on the CPU.
        prefix_cache: prompts that begin alike compute that beginning once; full blocks are kept for later prompts until
            their space is needed.
        use_chat_template: read the model's chat template; without it, `chat` is refused.
        progress: told in words what is going on.

    Attributes:
        config, tokenizer, chat_template, engine, runner, device, dtype, limits, plan, kv_plan: what was made.
        warnings: what the user should know, one sentence each.

    Raises UserError for what cannot be run.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        max_batched_tokens: int | None = None,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        memory_fraction: float = MEMORY_FRACTION,
        graphs: bool = True,
        run_ahead: int | None = None,
        prefix_cache: bool = True,
        use_chat_template: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.warnings: list[str] = []
        self._lock = threading.Lock()
        say: Progress = progress or (lambda text: None)
        if isinstance(model, ModelConfig):
            config, weight_map = model, None
        else:
            model = Path(__file__).parent / "demo" if model == "demo" else Path(model)
            config = read_config(model)
            weight_map = map_weights(config, open_checkpoint(model))
            self.warnings += weight_map.warnings
            self.tokenizer = Tokenizer.from_folder(model)
            self.chat_template = ChatTemplate.from_folder(model) if use_chat_template else None
        self._choose_device(device, config, dtype, say)
        say("making random weights" if weight_map is None else "loading weights")
        try:
            if weight_map is None:
                weights = random_weights(config, dtype=DTYPES[self.dtype], device=self.device)
            else:
                weights = load_weights(config, weight_map, dtype=DTYPES[self.dtype], device=self.device)
        except RuntimeError as error:
            raise self._no_room_for_weights(config, error) from error
        self._assemble(
            config,
            weights,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_batched_tokens=max_batched_tokens,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            kv_cache_memory=kv_cache_memory,
            memory_fraction=memory_fraction,
            graphs=graphs,
            run_ahead=run_ahead,
            prefix_cache=prefix_cache,
        )

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continues texts as they are, without the chat template. Calls of several threads wait for each other.

        Args:
            prompts: one or many; all are read before the first is answered.
            sampling_params: for all prompts, or one for each; None: `get_default_sampling_params()`.

        Returns:
            One output a prompt, in their order.

        Raises:
            UserError: a prompt is empty or too long, or no text can be read from it; nothing is generated then.
        """
        many: list[Any] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        if many and isinstance(many[0], Integral):
            many = [many]
        return self._answer(many, self._encode, sampling_params)

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or many, through the model's chat template; otherwise as `generate`."""
        template = self.chat_template
        if template is None:
            raise UserError("the model has no chat template", fix="Use generate.")
        many: list[Any] = list(messages)
        if many and isinstance(many[0], Mapping):
            many = [many]
        return self._answer(many, lambda one: (None, encode_chat(self.tokenizer, template, one)), sampling_params)

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json recommends; else greedy. `max_tokens` is 256."""
        return SamplingParams(**({"max_tokens": MAX_TOKENS} | recommended_sampling(self.config.generation)))

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text, if there is one, and token ids of a prompt."""
        if isinstance(prompt, Mapping):
            prompt = prompt["prompt"] if prompt.get("prompt_token_ids") is None else prompt["prompt_token_ids"]
        if isinstance(prompt, str):
            return prompt, encode_text(self.tokenizer, prompt)
        return None, [int(token_id) for token_id in prompt]

    def _answer(
        self,
        prompts: Sequence[Any],
        encode: Callable[[Any], tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts, but {len(each)} sampling_params", fix="Give one, or one for each."
            )
        places = [f"prompt {number} of {len(prompts)}" for number in range(1, len(prompts) + 1)]
        encoded = []
        for prompt, place in zip(prompts, places, strict=True):
            with _told_where(place):
                text, token_ids = encode(prompt)
                encoded.append((text, check_ids(token_ids, self.config.vocab_size)))
        with self._lock:
            requests = Requests(self.engine, self.tokenizer, self.config.eos_token_ids)
            try:
                for (text, token_ids), own, place in zip(encoded, each, places, strict=True):
                    with _told_where(place):
                        requests.add(token_ids, own, prompt=text)
                return requests.finish_all()
            except BaseException as error:
                if isinstance(error, LogitsError):
                    error.where = places[requests.request_of(error.seq_id)]
                requests.abort()
                raise

    def _choose_device(self, device: str, config: ModelConfig, dtype: str, say: Progress) -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise UserError(f"unknown device {device!r}", where="--device", fix="Use auto, cpu or cuda.")
        if dtype not in ("auto", *DTYPES):
            raise UserError(f"unknown dtype {dtype!r}", where="--dtype", fix=f"Use auto, {', '.join(DTYPES)}.")
        use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        if use_cuda:
            try:
                require_cuda()
                raise_any(cuda_faults(config, dtype))
                from cuda_ext.build import load_extension

                load_extension(say)
            except UserError as error:
                if device == "cuda":
                    raise
                self.warnings.append(f"running on the CPU, because CUDA cannot be used: {error}")
                use_cuda = False
        self.device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
        if dtype != "auto":
            self.dtype = dtype
        else:
            self.dtype = pick_dtype(config.dtype, use_cuda)
            if use_cuda and self.dtype != config.dtype:
                self.warnings.append(f"the checkpoint is {config.dtype}; on CUDA it runs in {self.dtype}")

    def _assemble(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        max_num_seqs: int | None,
        max_model_len: int | None,
        max_batched_tokens: int | None,
        block_size: int,
        num_kv_blocks: int | None,
        kv_cache_memory: int | None,
        memory_fraction: float,
        graphs: bool,
        run_ahead: int | None,
        prefix_cache: bool,
    ) -> None:
        """Plans the memory and builds runner and engine around `weights`, which lie on `self.device`."""
        cuda = self.device.type == "cuda"
        self.config = config
        self.limits = default_limits(config, cuda, max_num_seqs, max_model_len, max_batched_tokens, block_size)
        self.plan = plan_buffers(config, self.limits, self.dtype)
        if num_kv_blocks is not None:
            kv_cache_memory = num_kv_blocks * kv_block_bytes(config, block_size, self.dtype)
        elif kv_cache_memory is None:
            kv_cache_memory = self._free_for_cache(memory_fraction)
        self.kv_plan: KVPlan = plan_kv_cache(config, self.limits, self.dtype, kv_cache_memory)
        try:
            self.runner = ModelRunner(config, weights, self.limits, self.plan, self.kv_plan, graphs=graphs)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise UserError(
                f"out of memory: {self.plan.total_bytes / 2**20:,.0f} MiB of buffers and "
                f"{self.kv_plan.total_bytes / 2**20:,.0f} MiB of KV cache do not fit beside "
                f"{weights.arena.nbytes / 2**20:,.0f} MiB of weights",
                fix="Lower --max-model-len, --max-num-seqs, --max-batched-tokens or --kv-cache-memory.",
            ) from error
        pool = BlockPool(self.kv_plan.num_blocks, block_size)
        self.engine = Engine(
            Scheduler(self.limits, pool, prefix_cache),
            self.runner,
            run_ahead=(1 if cuda else 0) if run_ahead is None else run_ahead,
            eos_token_ids=config.eos_token_ids,
        )

    def _no_room_for_weights(self, config: ModelConfig, error: RuntimeError) -> Exception:
        """What to raise for an error of loading: a UserError with the numbers if memory was short, else the error."""
        if not _is_out_of_memory(error):
            return error
        _, needed = weights_layout(config, DTYPES[self.dtype].itemsize)
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else available_memory()
        return UserError(
            f"out of memory: {needed / 2**20:,.0f} MiB of {self.dtype} weights, and {free / 2**20:,.0f} MiB are free",
            where=str(self.device),
            fix="Free memory, or choose --dtype bfloat16, --device cpu or a smaller model.",
        )

    def _free_for_cache(self, memory_fraction: float) -> int:
        """Bytes that the KV cache may take, once weights are loaded and with the buffers still to come."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return cuda_kv_bytes(free, total, memory_fraction, self.plan.total_bytes)
        return cpu_kv_bytes(available_memory(), memory_fraction)


@contextmanager
def _told_where(where: str) -> Iterator[None]:
    """Names the place in a UserError that says none."""
    try:
        yield
    except UserError as error:
        error.where = error.where or where
        raise


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error)


def require_cuda() -> None:
    """UserError unless torch sees a GPU."""
    if not torch.cuda.is_available():
        raise UserError(
            "no CUDA device can be used: torch sees none",
            where="--device cuda",
            fix="Install a CUDA build of torch and a driver for it, or use --device cpu.",
        )
