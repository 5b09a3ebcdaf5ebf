"""Chats: which text a template renders, which tokens have a loss, and what bad rows say."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtron.checkpoint.convert import data_of_run, trained_template
from dtron.config import Data
from dtron.data import load_tokenizer, open_data
from dtron.data.corpus.chat import CHATML, ChatRows
from dtron.data.corpus.documents import Reading, files_corpus
from dtron.data.corpus.hf import HfStream, hf_corpus
from dtron.data.corpus.prepare import prepare_folder
from dtron.data.packing import IGNORE
from dtron.data.sources import identity_of
from dtron.data.stream import START
from dtron.data.tokenizer import NO_LOSS, MaskedText, encode_documents
from dtron.errors import ConfigError, DataError
from tests.harness import run_ranks
from tests.training.test_trainer import fit, rows, tiny

# Without marks, and with them; and with reasoning in the last turns alone, as models that think do.
PLAIN = """{%- if tools %}{{ bos_token }}tools {{ tools | tojson }}
{% endif %}
{%- macro content(message) %}{{ message.content | trim }}{% endmacro %}
{%- for message in messages %}
[{{ message.role }}] {% if message.tool_calls %}call {{ message.tool_calls[0].function | tojson }}
{%- else %}{{ content(message) }}{% endif %}<|turn|>
{%- endfor %}
{%- if add_generation_prompt %}
[assistant] {% endif %}"""
MARKED = PLAIN.replace(
    "{% if message.tool_calls %}",
    "{% if message.role == 'assistant' %}{% generation %}"
    "{% if message.tool_calls %}call {{ message.tool_calls[0].function | tojson }}"
    "{% else %}{{ content(message) }}{% endif %}<|turn|>{% endgeneration %}"
    "{% continue %}{% endif %}"
    "{% if message.tool_calls %}",
)
FORGETS = (
    "{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.last = messages.index(m) %}{% endfor %}"
) + PLAIN.replace(
    "{%- else %}", "{%- elif loop.index0 > ns.last %}(thinks) {{ message.content }}{% else %}"
)


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TURNS = [
    said("system", "Be brief."),
    said("user", "größer?"),
    said("assistant", "größte – ja"),
    said("user", "and <b>?"),
    said("assistant", "the word"),
]
CALL = {"type": "function", "function": {"name": "word", "arguments": {"in": "the <b>"}}}
TOOLS = [{"type": "function", "function": {"name": "word", "parameters": {"type": "object"}}}]
CALLS = [
    said("user", "call it"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    said("tool", "was"),
    said("assistant", "It was."),
]
Make = Callable[..., Data]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A data section over rows, as JSONL, with a cache of its own."""

    def data(rows: list[Any], format: str = "chat", **settings: Any) -> Data:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
        values = {"paths": (str(tmp_path / "chats.jsonl"),), "packing": "best_fit"}
        folder = str(tmp_path / "cache")
        return Data.model_validate({**values, "cache_dir": folder, "format": format, **settings})

    return data


def template(folder: Path, text: str) -> str:
    (folder / "chat.jinja").write_text(text)
    return str(folder / "chat.jinja")


def supervised(document: object) -> list[str]:
    assert isinstance(document, MaskedText)
    return [document.text[first:end] for first, end in document.spans]


def read(data: Data) -> list[Any]:
    return list(files_corpus(data).documents(Reading(data)))


def test_labels_are_the_assistants_tokens(make: Make, bpe: Path) -> None:
    for tokenizer in ("byte", str(bpe)):
        data = make([{"messages": TURNS}] * 3, tokenizer=tokenizer, chat_template="chatml")
        source, _ = open_data(data, seq_len=600, seed=0)
        packed, decoder = source.sequence(0), load_tokenizer(data)
        has_loss = packed.labels != IGNORE
        ahead = np.append(packed.tokens[1:], decoder.eos_id)
        np.testing.assert_array_equal(packed.labels[has_loss], ahead[has_loss])
        found = decoder.decode(packed.labels[has_loss].tolist())
        assert found == "größte – ja<|im_end|>the word<|im_end|>" * found.count("the word")
        assert "<|im_start|>user\ngrößer?<|im_end|>\n" in decoder.decode(packed.tokens.tolist())


@pytest.mark.parametrize(("messages", "tools"), [(TURNS, None), (CALLS, TOOLS)])
def test_prefixes_find_what_marks_say(
    make: Make, tmp_path: Path, messages: list[Any], tools: Any
) -> None:
    row = {"messages": messages, "tools": tools}
    found = []
    for text in (PLAIN, MARKED):
        data = make([row], chat_template=template(tmp_path, text))
        found.append(ChatRows(data).document(row, "row 1"))
    assert found[0] == found[1]
    call = 'call {"name": "word", "arguments": {"in": "the <b>"}}<|turn|>'
    expected = [call, "It was.<|turn|>"] if tools else ["größte – ja<|turn|>", "the word<|turn|>"]
    assert supervised(found[0]) == expected


def test_a_completion_alone_has_a_loss(make: Make, tmp_path: Path) -> None:
    path = template(tmp_path, FORGETS)
    chat = {"prompt": TURNS[:4], "completion": [TURNS[4]]}
    texts = {"prompt": "größer? ", "completion": "ja"}
    data = make([texts, chat], "prompt_completion", chat_template=path)
    first, second = read(data)
    (ids,) = encode_documents(load_tokenizer(data), [first])
    assert [i for i in ids if i < NO_LOSS] == [*b"ja", 256]
    assert [i - NO_LOSS for i in ids if i >= NO_LOSS] == list("größer? ".encode())
    assert supervised(second) == ["(thinks) the word<|turn|>"]
    with pytest.raises(DataError, match=r"row 1: .* the text of message 3 is not known"):
        ChatRows(make([], chat_template=path)).document({"messages": TURNS}, "row 1")


BAD = [
    ("{", "not JSON"),
    ({"text": "a"}, "no key 'messages'"),
    ({"messages": []}, "'messages' is empty"),
    ({"messages": "hello"}, "'messages' is str"),
    ({"messages": ["hello"]}, "message 1 of 'messages' is str"),
    ({"messages": [{"content": "a"}]}, "message 1 of 'messages' has no 'role' among 'content'"),
    ({"messages": [{"role": "user"}]}, "has neither 'content' nor 'tool_calls'"),
    ({"messages": TURNS[:2]}, "no message is of the role 'assistant'"),
    ({"messages": [said("assistant", "a", tool_calls=3), *TURNS]}, "the chat template fails"),
    ([1], "expected a JSON object"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_rows_name_file_and_line(
    make: Make, tmp_path: Path, row: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"messages": TURNS}
    data = make([good, row, good], chat_template=template(tmp_path, PLAIN))
    with pytest.raises(DataError) as error:
        read(data)
    assert str(error.value).startswith(f"{data.paths[0]}, line 2: ")
    assert message in str(error.value)
    reading = Reading(data, skip_errors=True)
    caplog.set_level(logging.ERROR, "dtron")
    assert len(list(files_corpus(data).documents(reading))) == 2
    assert len(reading.skipped) == 1


def test_templates_are_checked_at_the_start(make: Make, tmp_path: Path, bpe: Path) -> None:
    for settings, message in (
        ({"tokenizer": str(bpe)}, "has no chat template; set data.chat_template"),
        ({"chat_template": template(tmp_path, "{% for %}")}, "not a jinja template: line 1"),
        ({"chat_template": str(tmp_path / "none")}, "No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            files_corpus(make([], **settings))
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match="has no rows"):
        files_corpus(make([], paths=(str(tmp_path / "a.txt"),)))


def test_the_cache_knows_the_template_and_prepared_folders_hold_the_mask(
    make: Make, tmp_path: Path
) -> None:
    contents = []
    for text in (CHATML, CHATML.replace("'<|im_end|>' }}{% endgen", "'' }}{% endgen")):
        data = make([{"messages": TURNS}] * 4, chat_template=template(tmp_path, text))
        source, _ = open_data(data, seq_len=256, seed=0)
        contents.append(identity_of(data, load_tokenizer(data))["content"])
    assert contents[0] != contents[1]
    out = tmp_path / "out"
    prepare_folder(files_corpus(data), load_tokenizer(data), out, 1, False)
    values = {"source": "prepared", "paths": (str(out),), "format": "text", "chat_template": ""}
    there, _ = open_data(data.model_copy(update=values), seq_len=256, seed=0)
    for name in ("tokens", "labels", "documents"):
        np.testing.assert_array_equal(
            getattr(there.sequence(1), name), getattr(source.sequence(1), name)
        )


def test_tokens_and_masks_are_those_of_transformers(make: Make, tmp_path: Path, bpe: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe), bos_token="<|pad|>")
    reference: Any = made
    for text in (PLAIN, MARKED, CHATML):
        reference.chat_template = text
        reference.save_pretrained(str(tmp_path / "model"))
        data = make([], tokenizer=str(tmp_path / "model"))
        document, tokenizer = ChatRows(data).document, load_tokenizer(data)
        reasoned = [*TURNS[:4], said("assistant", "the word", reasoning="x")]
        for messages, tools in ((TURNS, None), (CALLS, TOOLS), (reasoned, None)):
            if text == CHATML and tools:
                continue
            row = {"messages": messages, "tools": tools}
            (ids,) = encode_documents(tokenizer, [document(row, "row 1")])
            marked = text != PLAIN
            found = reference.apply_chat_template(
                messages, tools=tools, return_dict=True, return_assistant_tokens_mask=marked
            )
            assert [i % NO_LOSS for i in ids] == found["input_ids"]
            if marked:
                assert [int(i < NO_LOSS) for i in ids] == found["assistant_masks"]


def test_tables_hold_the_same_chats(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chats = [{"messages": TURNS, "tools": None}, {"messages": CALLS, "tools": TOOLS}] * 2
    data = make(chats, chat_template=template(tmp_path, PLAIN))
    pq.write_table(pa.Table.from_pylist(chats), str(tmp_path / "chats.parquet"))
    values = {"source": "hf", "hf_path": str(tmp_path / "chats.parquet")}
    streamed = data.model_copy(update={**values, "hf_streaming": True})
    found = [
        read(data.model_copy(update={"paths": (values["hf_path"],)})),
        list(hf_corpus(data.model_copy(update=values)).documents(Reading(data))),
        list(HfStream(streamed).read(START)),
    ]
    assert found == [read(data)] * 3
    sequences, _ = open_data(streamed, seq_len=400, seed=0)
    packed = sequences.sequence(0)
    assert packed.tokens.max() < 257
    assert 0 < np.count_nonzero(packed.labels != IGNORE) < 200


CHATS = [
    {"messages": [said("user", "ab" * (1 + 3 * i % 7)), said("assistant", "cd" * (1 + i * i % 9))]}
    for i in range(8)
]
LAYOUTS = {
    "packed": (1, {}),
    "packed, two ranks": (2, {"train__micro_batch": 1}),
    "packed, context parallel": (2, {"parallel__cp": 2}),
    "packed, pipeline": (2, {"parallel__pp": 2, "train__micro_batch": 1}),
}


def settings_of(make: Make, packing: str, n: int) -> dict[str, Any]:
    data = make(CHATS, packing=packing, mask_documents=True, validation_fraction=0.0)
    own = data.model_dump(mode="json", exclude_defaults=True)
    keys = {f"data__{key}": value for key, value in own.items()}
    return {**keys, "train__seq_len": 160, "train__steps": 1, "train__global_batch": n}


def logged(make: Make, run_dir: Path, packing: str, n: int, ranks: int, **layout: Any) -> dict:
    off = {"train__eval_sequences": 0, "train__micro_batch": 2}
    run_ranks(ranks, fit, tiny(run_dir, **{**settings_of(make, packing, n), **off, **layout}))
    return rows(run_dir)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_chats_equal_unpacked_ones(make: Make, tmp_path: Path, layout: str) -> None:
    ranks, changes = LAYOUTS[layout]
    one = logged(make, tmp_path / "one", "pad", 8, 1)
    other = logged(make, tmp_path / "other", "best_fit", 4, ranks, **changes)
    for key in ("loss", "grad_norm"):
        assert other[key] == pytest.approx(one[key], rel=1e-6), key


def test_steps_without_a_label_have_no_loss(make: Make, tmp_path: Path) -> None:
    nothing = CHATML.replace("message.content + '<|im_end|>' }}{% endgen", "'' }}{% endgen")
    path = template(tmp_path, nothing)
    row = logged(make, tmp_path / "run", "pad", 8, 1, data__chat_template=path)
    assert (row["loss"], row["grad_norm"], row.get("skipped", 0)) == (0.0, 0.0, 0)


def test_an_export_has_the_template_of_the_run(tmp_path: Path) -> None:
    checkpoint, config = tmp_path / "run/checkpoints/step-1", tmp_path / "run/config.toml"
    checkpoint.mkdir(parents=True)
    for text, wanted in (
        ('[data]\nformat = "chat"\npacking = "pad"\n', CHATML),
        ("[data]\n", ""),
        ('[data]\nformat = "chat"\npacking = "pad"\ntokenizer = "theirs"\n', ""),
    ):
        config.write_text(text)
        assert trained_template(data_of_run(checkpoint)) == wanted
