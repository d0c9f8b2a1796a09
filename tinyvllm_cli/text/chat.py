"""Chat templates: a conversation to the text that the model was trained on. Templates are foreign code: sandboxed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinyvllm_cli.errors import UserError
from tinyvllm_cli.text.tokenizer import read_object, read_tokenizer_config, special_tokens


class ChatTemplate:
    """A compiled chat template.

    What it renders is complete: encode it with `add_special_tokens=False`, so that a BOS stands in front exactly when
    the template writes one (as transformers does).

    Args:
        source: the Jinja text.
        tokens: named special tokens, variables of the template ("bos_token", ...).
        where: file that it comes from, for messages.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str = "chat template") -> None:
        self.source = source
        self._tokens = dict(tokens)
        self._where = where
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = _tojson
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # foreign code, as in `render`
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise UserError(
                f"syntax error in the chat template{line}: {getattr(error, 'message', error)}",
                where=where,
                fix="Mend the template, or use --raw to do without it.",
            ) from error

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The template of a model folder; None when it has none.

        Looked for in chat_template.jinja, chat_template.json and tokenizer_config.json, in this order; of a list of
        named templates the one called "default" is taken.
        """
        config = read_tokenizer_config(folder)
        tokens = special_tokens(config)
        path = folder / "chat_template.jinja"
        if path.is_file():
            try:
                source = path.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                raise UserError("the template is not UTF-8", where=str(path), fix="Fetch the file again.") from error
            if source.startswith("version https://git-lfs"):
                raise UserError("looks like a Git LFS pointer", where=str(path), fix="Fetch the file: git lfs pull")
            return cls(source, tokens, str(path))
        path = folder / "chat_template.json"
        if path.is_file():
            return cls(_default_of(read_object(path).get("chat_template"), str(path)), tokens, str(path))
        path, value = folder / "tokenizer_config.json", config.get("chat_template")
        if value is None:
            return None
        return cls(_default_of(value, str(path)), tokens, str(path))

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation as text.

        Args:
            messages: objects with "role" and "content".
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            UserError: the template refuses the conversation (roles that do not alternate, ...).
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except UserError:
            raise
        except Exception as error:  # foreign code: whatever it does wrong is the template's or the conversation's fault
            raise UserError(
                f"the chat template does not accept these messages: {error}",
                fix=f"See {self._where}, or use --raw to do without it.",
            ) from error


def _default_of(value: Any, where: str) -> str:
    """The template text out of a string, a list of {"name", "template"}, or an object of names and templates."""
    if isinstance(value, str):
        return value
    named = value if isinstance(value, dict) else {}
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    if isinstance(named.get("default"), str):
        return str(named["default"])
    names = ", ".join(sorted(str(name) for name in named)) or "none"
    raise UserError(
        f"chat_template names no template called default (names: {names})",
        where=where,
        fix="Name one of them default, or use --raw to do without a template.",
    )


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the assistant says, for training; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options)
