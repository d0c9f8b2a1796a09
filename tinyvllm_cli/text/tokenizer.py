"""Text to token ids and back, from a Hugging Face folder's tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from tinyvllm_cli.errors import UserError

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_TOKEN_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")


class Tokenizer:
    """A tokenizer as its files describe it.

    Attributes:
        folder: where it comes from.
        vocab_size: number of token ids, added tokens included.
        special_tokens: name ("bos_token", ...) to token text, as far as tokenizer_config.json names them.
        special_ids: ids that are never shown as text.
        bos_token, bos_token_id, eos_token, eos_token_id: None where there is none.
    """

    def __init__(self, folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        self.folder = folder
        self._backend = backend
        backend.no_truncation()  # a tokenizer.json may carry the settings of its training, and would cut prompts
        backend.no_padding()
        backend.encode_special_tokens = config.get("split_special_tokens") is True  # names in a text stay text
        try:
            _add_tokens(backend, config, folder)
        except UnicodeEncodeError as error:
            what, where = f"a token is no text: {error.object!r}", str(folder / "tokenizer_config.json")
            raise UserError(what, where=where, fix="Fetch the file again.") from error
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens = special_tokens(config)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token, self.bos_token_id = self._named("bos_token")
        self.eos_token, self.eos_token_id = self._named("eos_token")
        self._add_bos: bool | None = config.get("add_bos_token")
        self._bytes: dict[int, bytes] = {}  # of the tokens met so far
        self._piece, self.strips_leading_space = _piece_function(json.loads(backend.to_str())["decoder"])

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads the tokenizer of a model folder; UserError when it is missing or broken."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            fix = "Put the model's tokenizer.json into the folder."
            if (folder / "tokenizer.model").exists():
                fix = "Convert the SentencePiece tokenizer.model to a tokenizer.json (transformers can)."
            raise UserError("no tokenizer.json", where=str(folder), fix=fix)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"this is no tokenizer that can be read ({error})",
                where=str(path),
                fix="Fetch the file again; it may be cut off or a Git LFS pointer.",
            ) from error
        return cls(folder, backend, read_tokenizer_config(folder))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; names of special tokens inside it become those tokens, unless tokenizer_config.json says
        `split_special_tokens`.

        With `add_special_tokens` what the tokenizer puts around a text is added, as a rule a BOS in front. A BOS that
        the text itself begins with is not doubled. `add_bos_token` of tokenizer_config.json decides where it is given.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise UserError("the text holds half of a surrogate pair, which is no character") from error
        bos = self.bos_token_id
        if not add_special_tokens or bos is None or self.bos_token is None:
            return ids
        own = text.startswith(self.bos_token)
        if self._add_bos is True and ids[:1] != [bos]:
            return [bos, *ids]
        doubled = own and ids[:2] == [bos, bos]
        unwanted = not own and ids[:1] == [bos] and self._add_bos is False
        return ids[1:] if doubled or unwanted else ids

    def decode(self, token_ids: Sequence[int], hidden_ids: Collection[int] = ()) -> str:
        """Text of `token_ids` without special tokens and `hidden_ids`; equal to what `IncrementalDecoder` streams.

        Bytes that are no UTF-8 give U+FFFD.
        """
        hidden = self.special_ids.union(hidden_ids)
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in hidden)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id beyond the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id)
            data = self._bytes[token_id] = b"" if token is None else self._piece(token)
        return data

    def token_to_id(self, token: str) -> int | None:
        """Id of a token's text, None when there is no such token."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def _named(self, name: str) -> tuple[str | None, int | None]:
        token = self.special_tokens.get(name)
        return token, None if token is None else self.token_to_id(token)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of a model folder, and the special tokens that only special_tokens_map.json names.

    Before there was `added_tokens_decoder`, added_tokens.json said what was added: {"<pad>": 32000, ...}, a key here.
    """
    config = read_object(folder / "tokenizer_config.json")
    for name, token in read_object(folder / "special_tokens_map.json").items():
        if name in (*SPECIAL_TOKEN_NAMES, *_EXTRA) and config.get(name) is None:
            config[name] = token
    if "added_tokens_decoder" not in config:
        config["added_tokens.json"] = read_object(folder / "added_tokens.json")
    return config


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} when there is no file."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"no valid JSON ({error})", where=str(path), fix="Fetch the file again.") from error
    if not isinstance(config, dict):
        raise UserError("holds no JSON object", where=str(path), fix="Fetch the file again.")
    return config


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of a tokenizer_config.json; each is a string there or an object with "content".

    Names of the model's own are those of `extra_special_tokens`, where it is an object.
    """
    found, own = {}, config.get("extra_special_tokens")
    named = {name: config.get(name) for name in SPECIAL_TOKEN_NAMES}
    for name, value in ({**named, **own} if isinstance(own, dict) else named).items():
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str) and value:
            found[name] = value
    return found


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], folder: Path) -> None:
    """Adds the tokens that tokenizer.json does not know, as transformers does; else they would be spelled out.

    First those of `added_tokens_decoder`, {"2": {"content": "</s>", "special": true, ...}, ...}, whose flags go before
    those of tokenizer.json; then the named ones, which are special whatever tokenizer.json says.
    UserError when two files give a token different ids.
    """
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    changed: dict[str, tokenizers.AddedToken] = {}

    def add(content: str, flags: dict[str, bool]) -> None:
        before = _flags(known.get(content))
        token = tokenizers.AddedToken(content, **flags | ({"special": True} if before.get("special") else {}))
        if _flags(token) != before:
            known[content] = changed[content] = token

    named = special_tokens(config)
    more = [token for name in _EXTRA if isinstance(config.get(name), list) for token in config[name]]
    texts = [(token.get("content") if isinstance(token, dict) else token, _flags(token)) for token in more]
    extra = {content: flags for content, flags in texts if isinstance(content, str)}
    listed = config.get("added_tokens_decoder")
    entries = listed.items() if isinstance(listed, dict) else ()
    ids = {int(key): entry for key, entry in entries if key.isdecimal() and isinstance(entry, dict)}
    for content, token_id in config.get("added_tokens.json", {}).items():
        if isinstance(token_id, int) and content not in known:
            ids[token_id] = {"content": content, "special": content in {*named.values(), *extra}}
    ids = {token_id: entry for token_id, entry in sorted(ids.items()) if isinstance(entry.get("content"), str)}
    for entry in ids.values():
        add(entry["content"], _flags(known.get(entry["content"])) | _flags(entry))
    for name, content in named.items():
        add(content, (_flags(known.get(content)) or _flags(config.get(name))) | {"special": True})
    for content, flags in extra.items():
        if content not in known:
            add(content, flags | {"special": True})
    backend.add_tokens([*changed.values()])  # at once: each call takes time for all that there are
    for token_id, entry in ids.items():
        actual = backend.token_to_id(entry["content"])
        if actual != token_id:
            where = str(folder / ("added_tokens.json" if listed is None else "tokenizer_config.json"))
            what = f"token {entry['content']!r} has id {token_id} here and {actual} in tokenizer.json"
            raise UserError(what, where=where, fix="Fetch both files again: they are not of the same model.")


def _flags(token: tokenizers.AddedToken | dict[str, Any] | str | None) -> dict[str, bool]:
    """The flags of a token, as far as it has them."""
    found = token if isinstance(token, dict) else {name: getattr(token, name, None) for name in _TOKEN_FLAGS}
    return {name: flag for name in _TOKEN_FLAGS if isinstance(flag := found.get(name), bool)}


def _piece_function(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """How a token's text becomes bytes, and whether a space at the very beginning of a text is dropped.

    Understood are byte-level decoders (GPT-2, Llama 3) and the two forms of SentencePiece (Llama 2): Metaspace, or a
    sequence of Replace, ByteFallback, Fuse and Strip. Their decoding is a concatenation, so text can be streamed.
    """
    if decoder is None:
        return lambda token: token.encode(), False
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    replace, strip, byte_level, byte_fallback = [], False, False, False
    for step in steps:
        match step["type"]:
            case "ByteLevel":
                byte_level = True
            case "ByteFallback":
                byte_fallback = True
            case "Replace" if "String" in step["pattern"]:
                replace.append((step["pattern"]["String"], step["content"]))
            case "Metaspace":
                replace.append((step["replacement"], " "))
                strip = step.get("prepend_scheme", "always") != "never"
            case "Strip" if step["content"] == " " and step["start"] <= 1 and step["stop"] == 0:
                strip = step["start"] == 1
            case "Fuse":
                pass
            case _:
                raise UserError(
                    f"the decoder {json.dumps(step)} is not supported",
                    where="tokenizer.json",
                    fix="Supported are byte-level tokenizers (Llama 3) and SentencePiece ones (Llama 2).",
                )

    def piece(token: str) -> bytes:
        if byte_level:
            if all(char in _BYTE_OF_CHAR for char in token):
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            return token.encode()
        if byte_fallback and _BYTE.fullmatch(token):
            return bytes.fromhex(token[3:5])
        for old, new in replace:
            token = token.replace(old, new)
        return token.encode()

    return piece, strip


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one character: visible Latin-1 as itself, the rest from U+0100 on."""
    visible = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_alphabet()
