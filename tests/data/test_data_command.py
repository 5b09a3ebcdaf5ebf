"""`dtron data`: prepared folders, and what a step is fed."""

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtron.cli import commands
from dtron.config import Data
from dtron.data import identity_of, open_data
from dtron.data.command import main
from dtron.data.corpus import tokenize
from dtron.data.tokenizer import ByteTokenizer
from dtron.errors import ConfigError, DataError

MakeData = Callable[..., Data]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> Path:
    """A folder with two files of 40 documents in all, and 4 tasks."""
    monkeypatch.setattr("dtron.data.corpus.documents.TASK_BYTES", 600)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, some in (("a", texts[:25]), ("b", texts[25:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in some)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """All files but the JSON of plan and shards, which name no work of their own."""
    files = [path for path in folder.iterdir() if path.suffix in (".tokens", ".documents")]
    return {path.name: path.read_bytes() for path in files}


def prepared(folder: Path, **keys: Any) -> Data:
    cache = str(folder.parent / "cache")
    values = {"source": "prepared", "paths": [str(folder)], "cache_dir": cache}
    return Data.model_validate(values | keys)


def sequences_of(data: Data) -> int:
    waste = open_data(data, seq_len=32, seed=0)[0].waste()
    assert waste is not None
    return waste.sequences


def test_a_prepared_folder_is_the_same_data(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the files: the same sequences, and a checkpoint of one resumes with the other."""
    out = tmp_path / "out"
    assert main(["prepare", "--paths", str(corpus), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "40 documents, 1,381 tokens, 4 shards" in printed
    assert f"25  {corpus / 'a.jsonl'}" in printed
    assert (out / "summary.log").read_text() in printed
    files = Data.model_validate({"paths": [str(corpus)], "cache_dir": str(tmp_path / "cache")})
    sources = [open_data(each, seq_len=32, seed=0)[0] for each in (files, prepared(out))]
    for k in (0, 7, 90):
        first, second = (source.sequence(k).tokens.tolist() for source in sources)
        assert first == second
    tokenizer = ByteTokenizer()
    assert identity_of(files, tokenizer) == identity_of(prepared(out), tokenizer)
    twice = prepared(out, paths=[str(out), str(out)])
    assert (sequences_of(prepared(out)), sequences_of(twice)) == (41, 83)


def test_a_killed_run_goes_on_from_its_shards(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of a run that was not killed, by two processes."""
    write, out, numbers = tokenize.write_shard, tmp_path / "out", []

    def killed(*given: Any) -> object:
        numbers.append(given[5])
        if len(numbers) == 3:
            raise KeyboardInterrupt
        return write(*given)

    monkeypatch.setattr(tokenize, "write_shard", killed)
    arguments = ["prepare", "--paths", str(corpus), "--workers", "1", "--out"]
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, str(out)])
    assert not (out / "corpus.json").exists()
    (out / "00003.tokens").write_bytes(b"begun")  # without its .json
    (out / "00003.cafe.partial").write_bytes(b"begun")
    main([*arguments, str(out)])
    assert numbers == ["00000", "00001", "00002", "00002", "00003"]
    other = tmp_path / "other"
    main(["prepare", "--paths", str(corpus), "--workers", "2", "--out", str(other)])
    assert len(content(other)) == 8
    assert content(out) == content(other)
    assert not list(out.glob("*.partial"))
    assert len(numbers) == 5  # two processes of their own


@pytest.mark.parametrize("workers", ["1", "2"])
def test_errors_stop_or_are_listed(
    corpus: Path, tmp_path: Path, workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = corpus / "b.jsonl"
    with file.open("a") as appended:
        appended.write("{\n")
    (corpus / "c.jsonl.gz").write_bytes(b"nothing")
    arguments = ["prepare", "--paths", str(corpus), "--workers", workers, "--out"]
    with pytest.raises(DataError, match=r"b\.jsonl, line \d+.*not JSON|c\.jsonl\.gz: Not a gz"):
        main([*arguments, str(tmp_path / "stop")])
    main([*arguments, str(tmp_path / "skip"), "--on-error", "skip"])
    printed = capsys.readouterr().out
    assert "left out because of 2 errors:" in printed
    assert re.search(rf"{file}, line \d+ after byte 600: not JSON", printed)
    assert f"{corpus / 'c.jsonl.gz'}: Not a gzipped file" in printed


def test_folders_of_something_else_are_refused(corpus: Path, tmp_path: Path, bpe: Path) -> None:
    out = tmp_path / "out"
    arguments = ["prepare", "--paths", str(corpus), "--out"]
    with pytest.raises(DataError, match="is not empty; name a new folder"):
        main([*arguments, str(corpus)])
    main([*arguments, str(out)])
    main([*arguments, str(out)])  # nothing to do
    with pytest.raises(DataError, match="was begun with another tokenizer"):
        main([*arguments, str(out), "--tokenizer", str(bpe)])
    with pytest.raises(
        DataError, match=r"made with another tokenizer than data\.tokenizer = .*; set"
    ):
        open_data(prepared(out, tokenizer=str(bpe)), seq_len=8, seed=0)
    os.utime(corpus / "a.jsonl", (1, 1))
    with pytest.raises(DataError, match=r"was begun with another corpus .*files have changed"):
        main([*arguments, str(out)])
    (out / "00001.tokens").unlink()
    with pytest.raises(DataError, match="is damaged or of another version; delete it"):
        open_data(prepared(out), seq_len=8, seed=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepares"], "no such command; did you mean prepare?; use prepare, show, stats"),
        (["prepare", "data.source=hf", "data.hf_path=x", "data.hf_streaming=true"], "nothing to"),
        (["prepare", "--on", "slurm"], "--on, --on-error and --workers need --out DIR"),
        (["prepare", "--out", "x", "--on-option", "time=1"], "no effect with --on local"),
        (["prepare", "--out", "x", "--on", "slurm", "--on-option", "time"], "is not KEY=VALUE"),
        (["prepare", "--on-option", "time=1"], "--on, --on-error and --workers need --out DIR"),
        (["prepare", "--workers", "2"], "--on, --on-error and --workers need --out DIR"),
        (["prepare", "--out", "x", "--workers", "0"], "--workers 0 is below 1"),
        (["show", "--step", "0"], "--step 0 is below 1"),
        (["show", "--dp-size", "0"], "--dp-size 0 is below 1"),
        (["show", "--dp-rank", "2"], "--dp-rank 2 is not below --dp-size 1"),
        (["show", "--dp-size", "3"], "not a multiple of 3"),
        (["stats", "data.source=hf", "data.hf_path=x", "data.hf_streaming=true"], "is not counted"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        main(arguments)
    assert message in str(error.value)


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_a_step_is_shown_with_its_documents(
    corpus: Path, tmp_path: Path, packing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f'data.paths=["{corpus}"]', f"data.cache_dir={tmp_path / 'cache'}"]
    keys += ["train.seq_len=64", "train.global_batch=4", "train.micro_batch=1"]
    keys += [f"data.packing={packing}", "data.mask_documents=true"]
    main(["show", "--step", "2", "--dp-size", "2", "--dp-rank", "1", *keys])
    shown = capsys.readouterr().out
    assert re.findall(r"sequence (\d+): step 2", shown) == ["5", "7"]
    data = Data.model_validate(
        {
            "paths": [str(corpus)],
            "cache_dir": str(tmp_path / "cache"),
            "packing": packing,
            "mask_documents": True,
        }
    )
    tokens = open_data(data, seq_len=64, seed=0)[0].sequence(5).tokens.tolist()
    text = bytes(token for token in tokens if token != 256).decode()
    found = re.findall(r"  -- tokens (\d+) to (\d+).*\n     (.*)", shown.split("sequence 7")[0])
    assert "".join(found_text for _, _, found_text in found) == text
    assert [int(last) + 1 for _, last, _ in found[:-1]] == [int(first) for first, _, _ in found[1:]]
    for name, document, start in re.findall(r"(\w)\.jsonl, document (\d+)\n     (\w\w)", shown):
        if start.isdecimal():  # a text begins with its number
            assert int(start) == int(document) - 1 + (25 if name == "b" else 0), shown
    page = tmp_path / "page.html"
    main(["show", "--step", "2", "--page", str(page), *keys])
    assert page.read_text().count("<h2>sequence") == 4
    assert '<span class="n">' in page.read_text()  # the last label is of another document


def test_statistics(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [f'data.paths=["{corpus}"]', f"data.cache_dir={tmp_path / 'cache'}"]
    assert commands(["data", "stats", *keys, "train.seq_len=100"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"39 documents and [\d,]+ tokens to train on, 1 documents", shown)
    assert re.search(r"\n +100 +\d+\.\d\d% / 0\.0% +\d+\.\d\d% / 0\.0% +0 / \d+\.\d%\n", shown)


def test_progress_tells_the_share_and_the_time_left(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dtron")
    monkeypatch.setattr(tokenize, "PROGRESS_SECONDS", 0.0)
    main(["prepare", "--paths", str(corpus), "--workers", "1", "--out", str(tmp_path / "out")])
    lines = [line for line in caplog.messages if "so far" in line]
    assert re.fullmatch(
        r"[\d.]+%: 40 documents, 1,381 tokens so far; .* MB/s, \d+ s left", lines[-1]
    )
