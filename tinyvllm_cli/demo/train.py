"""Makes the demo model again: `python -m tinyvllm_cli.demo.train --out FOLDER`, on a GPU in under 8 minutes.

Worker processes write seeded conversations and encode them; batches are rows of similar length; the loss counts answers
only. At the end the weights are rounded to bf16, saved as a Hugging Face folder and scored on held-out questions.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tinyvllm_cli.demo.data import EXTRA_SKILLS, SKILLS, Conversation, conversation, held_out
from tinyvllm_cli.demo.facts import FOLDER
from tinyvllm_cli.demo.network import Llama, Shape, save_folder
from tinyvllm_cli.demo.tokens import Encoder, train_tokenizer, write_tokenizer

LENGTHS = (48, 80, 128, 256)  # rows are padded to the first of these that holds them
SHARD_SIZE = 10000  # conversations made at a time
Shard = dict[
    int, tuple[NDArray[np.int16], NDArray[np.int16]]
]  # row length -> ids and labels [rows, length], -1 where no answer
_encoder: Encoder | None = None


def _start_worker(tokenizer_file: str) -> None:
    global _encoder
    _encoder = Encoder(Tokenizer.from_file(tokenizer_file))


def _make_shard(seed: int) -> Shard:
    """The seed's conversations, by row length."""
    assert _encoder is not None
    rng = Random(f"shard {seed}")
    rows: dict[int, list[tuple[list[int], list[int]]]] = {length: [] for length in LENGTHS}
    for _ in range(SHARD_SIZE):
        row = _encoder.row(conversation(rng), rng)
        length = next((length for length in LENGTHS if len(row.ids) <= length), None)
        if length is not None:
            pad = length - len(row.ids)
            labels = [token if loss else -1 for token, loss in zip(row.ids[1:], row.loss[1:], strict=True)]
            rows[length].append((row.ids + [0] * pad, labels + [-1] * (pad + 1)))
    return {
        length: (
            np.array([ids for ids, _ in found], np.int16).reshape(-1, length),
            np.array([labels for _, labels in found], np.int16).reshape(-1, length),
        )
        for length, found in rows.items()
    }


def batches(shards: Iterator[Shard], batch_tokens: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Full batches of one row length each, with the number of shards read so far."""
    waiting: dict[int, list[tuple[NDArray[np.int16], NDArray[np.int16]]]] = {length: [] for length in LENGTHS}
    for count, shard in enumerate(shards, 1):
        for length, arrays in shard.items():
            waiting[length].append(arrays)
            num_rows = batch_tokens // length // 8 * 8
            while sum(len(ids) for ids, _ in waiting[length]) >= num_rows:
                ids, labels = (np.concatenate(parts) for parts in zip(*waiting[length], strict=True))
                waiting[length] = [(ids[num_rows:], labels[num_rows:])]
                yield count, torch.from_numpy(ids[:num_rows]), torch.from_numpy(labels[:num_rows])


def train(model: Llama, device: torch.device, shards: Iterator[Shard], args: argparse.Namespace) -> None:
    """AdamW, short warm-up, linear decay to zero over the conversations (or the minutes, whichever end first)."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=args.rate,
        betas=(0.9, 0.98),
        eps=1e-9,
        fused=device.type == "cuda",
    )
    num_shards = max(1, args.conversations // SHARD_SIZE)
    started, step, tokens = time.monotonic(), 0, 0
    for count, ids, labels in batches(shards, args.batch_tokens):
        minutes = (time.monotonic() - started) / 60
        progress = max(count / num_shards, minutes / args.minutes)
        if minutes >= args.minutes:
            break
        rate = args.rate * min(
            1.0, (step + 1) / 300, max(0.0, 1 - progress) / (1 - args.hold) if progress > args.hold else 1.0
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        places = (labels.view(-1) >= 0).nonzero().squeeze(1)
        targets = labels.view(-1)[places].to(torch.int64)
        if device.type == "cuda":
            ids, places, targets = (t.pin_memory().to(device, non_blocking=True) for t in (ids, places, targets))
        hidden = model(ids.to(torch.int32))
        loss = F.cross_entropy(model.logits(hidden.reshape(-1, hidden.shape[-1])[places]), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + ids.numel()
        if step in (1, 10, 50) or step % 500 == 0:
            seconds = time.monotonic() - started
            print(
                f"step {step}  loss {loss.item():.4f}  rate {rate:.5f}  {count * SHARD_SIZE:,} conversations  "
                f"{seconds:.0f} s  "
                f"{tokens / seconds / 1e6:.2f} M tokens/s",
                flush=True,
            )
    print(f"trained {step} steps, {tokens / 1e6:.0f} M tokens in {time.monotonic() - started:.0f} s", flush=True)


@torch.no_grad()
def answer(
    model: Llama, encoder: Encoder, chats: list[Conversation], device: torch.device, max_tokens: int
) -> list[str]:
    """Greedy answers: the whole row again for each token, which is simple and fast enough for a model of this size."""
    prompts = [encoder.prompt(chat).ids for chat in chats]
    limit = max(len(ids) for ids in prompts) + max_tokens
    rows = torch.zeros(len(chats), limit, dtype=torch.int64)
    for i, ids in enumerate(prompts):
        rows[i, : len(ids)] = torch.tensor(ids)
    rows, ends = rows.to(device), torch.tensor([len(ids) for ids in prompts], device=device)
    active = torch.arange(len(chats), device=device)
    for _ in range(max_tokens):
        longest = -(-int(ends[active].max()) // 32) * 32
        hidden = model(rows[active, : min(longest, limit)])
        token = model.logits(hidden[torch.arange(len(active), device=device), ends[active] - 1]).argmax(-1)
        running = (token != encoder.end_of_turn) & (token != encoder.end_of_text)
        active, token = active[running], token[running]
        if not len(active):
            break
        rows[active, ends[active]] = token
        ends[active] += 1
    return [encoder.tokenizer.decode(rows[i, len(ids) : int(ends[i])].tolist()) for i, ids in enumerate(prompts)]


def score(
    model: Llama, encoder: Encoder, device: torch.device, count: int, show: int, max_tokens: int = 120
) -> dict[str, float]:
    """Share of exact answers by skill, on held-out questions; prints some of the mistakes."""
    scores: dict[str, float] = {}
    for skill in (*SKILLS, *EXTRA_SKILLS):
        chats = held_out(skill, count)
        found = answer(model, encoder, chats, device, max_tokens)
        wrong = [(chat.turns[-1], text) for chat, text in zip(chats, found, strict=True) if text != chat.turns[-1].text]
        scores[skill] = 1 - len(wrong) / count
        print(f"{scores[skill]:7.1%}  {skill}", flush=True)
        for turn, text in wrong[:show]:
            print(f"           {turn.question!r} -> {text!r}, not {turn.text!r}")
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--conversations", type=int, default=5_000_000)
    parser.add_argument(
        "--minutes", type=float, default=5.5, help="training ends here at the latest, with the rate decayed"
    )
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--hold", type=float, default=0.3, help="share of the training before the rate decays")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--score-count", type=int, default=1000)
    parser.add_argument("--show", type=int, default=6, help="mistakes to show by skill")
    parser.add_argument("--max-tokens", type=int, default=120, help="longest answer in scoring")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    began = time.monotonic()
    tokenizer = train_tokenizer()
    write_tokenizer(tokenizer, args.out)
    shutil.copy(FOLDER / "chat_template.jinja", args.out / "chat_template.jinja")
    num_shards = max(1, args.conversations // SHARD_SIZE)
    with multiprocessing.get_context("fork").Pool(
        args.workers, _start_worker, (str(args.out / "tokenizer.json"),)
    ) as pool:
        shards = pool.imap(_make_shard, range(num_shards))  # forked before CUDA starts
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = Llama(Shape(), torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
        print(
            f"{sum(p.numel() for p in model.parameters()):,} parameters, {time.monotonic() - began:.0f} s", flush=True
        )
        if not args.no_compile:
            for block in model.blocks:
                block.compile(dynamic=False)
        train(model, device, shards, args)
        pool.terminate()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    save_folder(model, args.out)
    model.eval()
    for block in model.blocks:
        block._compiled_call_impl = None
    scores = score(model, Encoder(tokenizer), device, args.score_count, args.show, args.max_tokens)
    (args.out / "scores.json").write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
    print(f"everything took {(time.monotonic() - began) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
