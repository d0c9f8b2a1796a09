"""The demo model's tokenizer (byte-level BPE, digits one by one, Llama 3's special tokens); conversations as rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tinyvllm_cli.demo.data import Conversation, Turn, conversation
from tinyvllm_cli.demo.facts import CUT
from tinyvllm_cli.demo.items import CHARS

VOCAB_SIZE = 1280
SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
)
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(seed: int = 0, num_conversations: int = 60000) -> Tokenizer:
    """Learns the merges from training conversations; the special tokens take the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = Random(f"tokenizer {seed}")
    texts = ["system", "user", "assistant", "\n\n"] * 50
    for _ in range(num_conversations):
        chat = conversation(rng)
        texts += [chat.system or "Hi"] + [text for turn in chat.turns for text in (turn.question, _plain(turn.answer))]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIALS),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    bos = SPECIALS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, {VOCAB_SIZE} were wanted")
    return tokenizer


def _id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}")
    return int(found)


def _plain(answer: str) -> str:
    """The answer without what is written character by character: reversed words must not become tokens."""
    return " ".join(answer.split(CHARS)[::2]).replace(CUT, " ")


@dataclass(frozen=True)
class Row:
    """Token ids of a conversation; `loss[i]` says whether token i is an answer that the model must learn to give."""

    ids: list[int]
    loss: list[bool]


class Encoder:
    """Conversation -> Row. In training, tokens of questions are at times split in halves: so spelling is learned."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        model = json.loads(tokenizer.to_str())["model"]
        vocab: dict[str, int] = model["vocab"]
        self._halves = {vocab[a + b]: (vocab[a], vocab[b]) for a, b in model["merges"]}
        self._cache: dict[str, list[int]] = {}
        special = {name: _id(tokenizer, name) for name in SPECIALS}
        self.bos, self.end_of_text, self.end_of_turn = special[SPECIALS[0]], special[SPECIALS[1]], special[SPECIALS[4]]
        self._header = {
            role: [special[SPECIALS[2]], *self._encode(role), special[SPECIALS[3]], *self._encode("\n\n")]
            for role in ("system", "user", "assistant")
        }

    def _encode(self, text: str) -> list[int]:
        ids = self._cache.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._cache) < 50000:
                self._cache[text] = ids
        return ids

    def answer(self, answer: str) -> list[int]:
        """Ids of an answer with its CHARS and CUT marks obeyed."""
        ids: list[int] = []
        for i, part in enumerate(answer.split(CHARS)):
            for piece in part if i % 2 else part.split(CUT):
                ids += self._encode(piece) if piece else []
        return ids

    def _split(self, ids: list[int], rng: Random, chance: float) -> list[int]:
        result: list[int] = []
        for token in ids:
            if token in self._halves and rng.random() < chance:
                result += self._split(list(self._halves[token]), rng, chance)
            else:
                result.append(token)
        return result

    def prompt(self, chat: Conversation, rng: Random | None = None) -> Row:
        """Everything before the last answer; with `rng`, questions are tokenised with random splits."""
        chance = 0.0 if rng is None or rng.random() < 0.6 else rng.uniform(0, 0.3)
        if chat.raw:
            ids = [self.bos, *self._encode(chat.turns[0].question)]
            return Row(ids, [False] * len(ids))
        row = Row([self.bos], [False])
        if chat.system:
            self._add(row, [*self._header["system"], *self._encode(chat.system), self.end_of_turn], False)
        for i, turn in enumerate(chat.turns):
            self._add(row, self._header["user"], False)
            self._add(
                row,
                [*self._split(self._encode(turn.question), rng, chance)]
                if rng and chance
                else self._encode(turn.question),
                False,
            )
            self._add(row, [self.end_of_turn, *self._header["assistant"]], False)
            if i + 1 < len(chat.turns):
                self._add(row, [*self.answer(turn.answer), self.end_of_turn], True)
        return row

    def row(self, chat: Conversation, rng: Random | None = None) -> Row:
        """The whole conversation, ended by end-of-turn (chat) or end-of-text (raw)."""
        row = self.prompt(chat, rng)
        last: Turn = chat.turns[-1]
        self._add(row, [*self.answer(last.answer), self.end_of_text if chat.raw else self.end_of_turn], True)
        return row

    @staticmethod
    def _add(row: Row, ids: list[int], loss: bool) -> None:
        row.ids.extend(ids)
        row.loss.extend([loss] * len(ids))


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[4],
        "pad_token": SPECIALS[5],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
