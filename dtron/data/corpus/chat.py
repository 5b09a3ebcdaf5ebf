"""Chats as documents: a chat template renders them to text, and only assistants' text has a loss.

    rows of data.format     keys                          text with a loss
    chat                    messages, perhaps tools       each turn of an assistant, to its end
    prompt_completion       prompt, completion            the completion, and EOS if both are texts

A template says what an assistant writes by {% generation %} ... {% endgeneration %}. Without these
marks, turn i is what the template adds to messages 0 ... i - 1, rendered with
`add_generation_prompt`, when message i follows; both must be a beginning of the whole text.

Templates are rendered as transformers does (`apply_chat_template`, tested with 5.24): jinja2 in its
sandbox, with the same options, functions and values. Source: https://huggingface.co/docs/
transformers/chat_templating.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dtron.config import Data
from dtron.data.tokenizer import MaskedText, tokenizer_file
from dtron.errors import ConfigError, DataError
from dtron.io.untrusted import JSON_BYTES, MB, read_text

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template `chatml`, of texts without tools."""
TEMPLATE_FILE = "chat_template.jinja"
"""File of a template in a Hugging Face folder."""
COLUMNS = {"chat": ("messages",), "prompt_completion": ("prompt", "completion")}
"""Keys that rows must have, by `data.format`; they may have OPTIONAL too."""
OPTIONAL = ("tools",)
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SPECIAL = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MARKS = (
    "use a template with {% generation %} marks (data.chat_template), or data.format = "
    '"prompt_completion" with a row for each turn'
)
Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]


class ChatTemplate:
    """A chat template.

    Args:
        sources: text of each template by name: `default`, and perhaps `tool_use`, which renders
            chats with tools.
        special: values of `bos_token`, `eos_token` and others for the template.
        name: name for messages.
    Raises:
        ConfigError: a template is not valid.
    """

    def __init__(self, sources: dict[str, str], special: dict[str, str], name: str) -> None:
        self._special = special
        self.fingerprint = hashlib.sha256(json.dumps([sources, special]).encode()).hexdigest()
        self._begin, self._end = (f"\0{secrets.token_hex(16)}\0" for _ in range(2))
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "marks": (self._begin, self._end),
        }
        self._templates = {}
        for key, source in sources.items():
            try:
                marked = _MARK.search(source) is not None
                self._templates[key] = environment.from_string(source), marked
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"{name} is not a jinja template: line {error.lineno}: {error.message}"
                ) from None

    def chat(self, messages: Messages, tools: list[Any] | None) -> MaskedText:
        """Render a chat, with a loss on all turns of assistants.

        Raises:
            ValueError: the template fails, or does not say which text is an assistant's.
        """
        text, marks, marked = self._render(messages, tools)
        if not marked:
            turns = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
            marks = [self._turn(messages, i, i + 1, tools, text) for i in turns]
        return MaskedText(text, tuple(marks))

    def completion(
        self, prompt: Messages, completion: Messages, tools: list[Any] | None
    ) -> MaskedText:
        """Render the chat prompt + completion, with a loss on the completion.

        Where the template has marks, only what they mark in the completion has one. Raises: as
        `chat`.
        """
        messages = [*prompt, *completion]
        text, marks, marked = self._render(messages, tools)
        begin, end = self._turn(messages, len(prompt), len(messages), tools, text)
        marks = [(max(a, begin), b) for a, b in marks if b > begin] if marked else [(begin, end)]
        return MaskedText(text, tuple(marks))

    def _turn(
        self, messages: Messages, first: int, last: int, tools: list[Any] | None, text: str
    ) -> tuple[int, int]:
        """Return where the messages [first, last) are in the text of all messages."""
        before, _, _ = self._render(messages[:first], tools, add_generation_prompt=True)
        through = text
        if last < len(messages):
            through, _, _ = self._render(messages[:last], tools)
        for end, part in ((first, before), (last, through)):
            if not text.startswith(part):
                raise ValueError(
                    f"messages 1 to {end} alone are not rendered as the beginning of the whole "
                    f"chat, so that the text of message {first + 1} is not known; {_MARKS}"
                )
        if not through.startswith(before):
            raise ValueError(
                f"message {first + 1} does not begin with the template's generation prompt; "
                f"{_MARKS}"
            )
        return len(before), len(through)

    def _render(
        self, messages: Messages, tools: list[Any] | None, add_generation_prompt: bool = False
    ) -> tuple[str, Spans, bool]:
        """Return the text, the spans that the template marks, and whether it has marks."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template, marked = self._templates[name]
        try:
            text = template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except Exception as error:  # a template may raise anything
            cause = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the chat template fails: {cause}") from None
        return (*self._without_marks(text), marked)

    def _without_marks(self, text: str) -> tuple[str, Spans]:
        parts, spans, length = [], [], 0
        for number, part in enumerate(text.split(self._begin)):
            inside, mark, rest = part.partition(self._end) if number else ("", "", part)
            if bool(number) != bool(mark):
                raise ValueError("the chat template nests {% generation %} marks or cuts them")
            if inside:
                spans.append((length, length + len(inside)))
            parts += [inside, rest]
            length += len(inside) + len(rest)
        return "".join(parts), spans


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}: puts the environment's marks around its text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        """Parse a block up to {% endgeneration %}."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        begin, end = self.environment.globals["marks"]
        return f"{begin}{caller()}{end}"


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, which does not escape HTML as jinja2's does."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def stated_template(data: Data) -> str:
    """Return the text of the template that `data` names; empty: chats have the tokenizer's own.

    Raises:
        ConfigError: its file cannot be read.
    """
    name = data.chat_template or ("chatml" if data.tokenizer == "byte" else "")
    if name == "chatml":
        return CHATML
    return _read(Path(name).expanduser()) if name else ""


def template_of(data: Data) -> ChatTemplate | None:
    """Return the template of `data.chat_template`, or else of the tokenizer; None: it has none.

    Raises:
        ConfigError: the template is not valid, or its file cannot be read.
    """
    byte = data.tokenizer == "byte"
    folder = Path() if byte else tokenizer_file(data.tokenizer).parent
    settings = {} if byte else _settings_of(folder)
    special = {key: _content(settings[key]) for key in _SPECIAL if settings.get(key)}
    if stated := stated_template(data):
        return ChatTemplate({"default": stated}, special, data.chat_template or "chatml")
    file, found = folder / TEMPLATE_FILE, settings.get("chat_template")
    if file.is_file():
        return ChatTemplate({"default": _read(file)}, special, str(file))
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}
    return ChatTemplate(found, special, f"chat_template of {folder}") if found else None


def _settings_of(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(read_text(file, JSON_BYTES))  # model_max_length may have 100 bits
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"data.tokenizer: {file}: {error}") from None
    return found if isinstance(found, dict) else {}


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _read(file: Path) -> str:
    try:
        return read_text(file, MB)
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(
            f'data.chat_template: {file}: {cause}; give the path of a jinja file, or "chatml"'
        ) from None


class ChatRows:
    """Makes documents of the rows of a `data.format` other than text.

    Args:
        data: the section.
    Raises:
        ConfigError: there is no chat template.
    """

    def __init__(self, data: Data) -> None:
        self._template, self._format = template_of(data), data.format
        self._most, self._most_mb = data.max_document_mb * MB, data.max_document_mb
        if self._template is None and data.format == "chat":
            raise ConfigError(f'data.format = "chat": {self._no_template(data)}')
        self._missing = self._no_template(data)
        known = self._template.fingerprint if self._template else ""
        self.identity = [data.format, known]
        """Identifier that changes whenever the same row might become another document."""

    @staticmethod
    def _no_template(data: Data) -> str:
        return (
            f"data.tokenizer = {data.tokenizer!r} has no chat template; set data.chat_template to "
            'a jinja file, or to "chatml" if that is how the model was trained'
        )

    def document(self, row: Any, where: str) -> MaskedText:
        """Make a document of one row.

        Raises:
            DataError: the row is not of the format, or the template fails.
        """
        try:
            if not isinstance(row, dict):
                raise ValueError(f"expected a JSON object, found {type(row).__name__}")
            made = self._chat(row) if self._format == "chat" else self._completion(row)
            made.text.encode()
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
        if len(made) > self._most:
            raise DataError(
                f"{where}: a chat of more than data.max_document_mb = {self._most_mb:g} million "
                "characters; raise the key, or split the chat"
            )
        return made

    def _chat(self, row: dict[str, Any]) -> MaskedText:
        messages = messages_of(row, "messages")
        if all(each["role"] != "assistant" for each in messages):
            raise ValueError("no message is of the role 'assistant', so that no token has a loss")
        assert self._template is not None, "checked at the start"
        return self._template.chat(messages, row.get("tools") or None)

    def _completion(self, row: dict[str, Any]) -> MaskedText:
        for key in COLUMNS["prompt_completion"]:
            if row.get(key) is None:
                raise ValueError(f"no {key!r} among {', '.join(map(repr, row)) or 'nothing'}")
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            text = prompt + completion
            return MaskedText(text, ((len(prompt), len(text)),), ended=True)
        both = messages_of(row, "prompt"), messages_of(row, "completion")
        if self._template is None:
            raise ValueError(self._missing)
        return self._template.completion(*both, row.get("tools") or None)


def messages_of(row: dict[str, Any], key: str) -> Messages:
    """Return the messages under a key, without keys of the value None.

    Raises:
        ValueError: they are no list of messages with a role, and with content or tool calls.
    """
    found = row.get(key)
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        what = f"{key!r} is {type(found).__name__}" if key in row else f"no key {key!r}"
        if isinstance(found, Sequence) and not found:
            what = f"{key!r} is empty"
        raise ValueError(f"{what}; a row needs a list of messages, each with role and content")
    messages: Messages = []
    for number, each in enumerate(found, 1):
        if not isinstance(each, dict):
            raise ValueError(f"message {number} of {key!r} is {type(each).__name__}, not an object")
        message = {name: value for name, value in each.items() if value is not None}
        if not isinstance(message.get("role"), str):
            known = ", ".join(map(repr, each)) or "nothing"
            raise ValueError(f"message {number} of {key!r} has no 'role' among {known}")
        if "content" not in message and not message.get("tool_calls"):
            raise ValueError(f"message {number} of {key!r} has neither 'content' nor 'tool_calls'")
        reasoning = next((message[name] for name in _REASONING if name in message), None)
        if reasoning is not None:  # templates read it by one of these names
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        messages.append(message)
    return messages
