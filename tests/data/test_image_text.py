"""Rows of text and images: tokens, packed sequences with their images, errors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dtron.config import Data
from dtron.data import Batch, load_tokenizer, open_all, prepare
from dtron.data.images import draw
from dtron.data.loader import stacked
from dtron.data.packing import IGNORE
from dtron.errors import ConfigError, DataError

TOKEN, P = 255, 16


def section(folder: Path, **keys: Any) -> Data:
    settings: dict[str, Any] = {
        "paths": (str(folder / "shapes.jsonl"),),
        "format": "image_text",
        "image_size": 32,
        "image_tokens": P,
        "image_token": TOKEN,
        "packing": "best_fit",
        "mask_documents": True,
        "cache_dir": str(folder / "cache"),
        "validation_fraction": 0.0,
    }
    return Data(**{**settings, **keys})


def batches(data: Data, seq_len: int, n: int = 3) -> list[Batch]:
    """Batches of two sequences, in the order of a run."""
    prepare(data, seq_len)
    source, _ = open_all(data, seq_len=seq_len, seed=1, global_batch=2)
    return [stacked(source.sequence, range(k, k + 2)) for k in range(0, 2 * n, 2)]


def pixels(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(path)).transpose(2, 0, 1))


def test_each_caption_has_its_image(tmp_path: Path) -> None:
    draw.write(tmp_path, 40)
    rows = [json.loads(line) for line in (tmp_path / "shapes.jsonl").read_text().splitlines()]
    captions: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        text = row["text"].removeprefix("<image>")
        captions.setdefault(text, []).append(pixels(tmp_path / row["images"][0]))
    tokenizer, seen = load_tokenizer(section(tmp_path)), 0
    for batch in batches(section(tmp_path), 100):
        assert batch.image_index is not None
        assert batch.images is not None
        shown = batch.image_index[..., 0] >= 0
        assert torch.equal(shown, batch.tokens == TOKEN)
        assert not ((batch.labels == TOKEN) & (batch.labels != IGNORE)).any()
        assert batch.pieces is not None
        for row in range(2):
            for piece in range(int(batch.pieces[row].max()) + 1):
                here = batch.pieces[row] == piece
                image, offset = batch.image_index[row, here].T
                assert offset[:P].tolist() == list(range(P))
                text = tokenizer.decode(batch.tokens[row, here][P:].tolist())
                own = batch.images[image[0]]
                assert any(torch.equal(own, known) for known in captions[text])
                # the last token of the image predicts the first byte of the caption
                assert batch.labels[row, here][P - 1] == ord("a")
                seen += 1
    assert seen > 12


def test_sequences_that_begin_within_an_image(tmp_path: Path) -> None:
    """Documents of 31 tokens in sequences of 10: pieces have parts of images."""
    draw.write(tmp_path, 8)
    offsets = set()
    for batch in batches(section(tmp_path), 10, n=10):
        assert batch.image_index is not None
        assert torch.equal(batch.image_index[..., 0] >= 0, batch.tokens == TOKEN)
        for row in batch.image_index:
            own = row[row[:, 0] >= 0][:, 1]
            offsets |= {tuple(own.tolist())}
    assert tuple(range(10)) in offsets
    assert tuple(range(10, 16)) in offsets


def test_a_batch_without_images_gets_a_blank_one(tmp_path: Path) -> None:
    """So that its rank takes part in the encoder's collectives."""
    draw.write(tmp_path, 4)
    (batch,) = batches(section(tmp_path), 40, n=1)
    assert batch.with_images(32) is batch
    assert batch.images is not None
    for images in (None, batch.images[:0]):  # a source of text; a sequence of text among others
        text = replace(batch, images=images).with_images(32)
        assert text.images is not None
        assert text.image_index is not None
        assert not text.images.any()
        assert text.images.shape == (1, 3, 32, 32)
        assert (text.image_index == -1).all()


def test_images_are_held_out_one_by_one(tmp_path: Path) -> None:
    """Equal captions of different images are no copies of one document."""
    draw.write(tmp_path, 64)
    data = section(tmp_path, validation_fraction=0.25)
    prepare(data, 40)
    _, sets = open_all(data, seq_len=40, seed=1, global_batch=2)
    held_out = [sets[""].sequence(k) for k in range(len(sets[""]))]
    assert all(packed.images is not None and len(packed.images) == 1 for packed in held_out)
    assert 4 < len(held_out) < 32


GOOD = {"text": "<image>a red circle", "images": ["0.png"]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "<image>", "images": ["99.png"]}, r"image \S*99\.png: No such file"),
        ({"text": "<image>", "images": ["bad.png"]}, r"image \S*bad\.png: cannot identify image"),
        ({"text": "<image>", "images": ["."]}, r"Is a directory"),
        ({"text": "<image><image>", "images": ["0.png"]}, r"2 times <image>, but 'images' has 1"),
        ({"text": "<image>"}, r"1 times <image>, but 'images' has 0"),
        ({"text": "a", "images": "0.png"}, r"'images' is '0\.png'; use a list of paths"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    draw.write(tmp_path, 16)
    (tmp_path / "bad.png").write_bytes(b"GIF?")
    with (tmp_path / "shapes.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(GOOD) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"shapes\.jsonl, line 18: .*{message}"):
        prepare(section(tmp_path), 64)


def test_an_image_that_is_damaged_later_is_named(tmp_path: Path) -> None:
    path = draw.write(tmp_path, 16)
    data = section(tmp_path)
    batches(data, 40)
    whole = (tmp_path / "3.png").read_bytes()
    (tmp_path / "3.png").write_bytes(whole[:60])
    source, _ = open_all(data, seq_len=40, seed=1, global_batch=2)
    with pytest.raises(DataError, match=rf"{path}, line 4: image \S*3\.png: "):
        source.sequences(range(16))


def test_a_token_outside_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    draw.write(tmp_path, 16)
    with pytest.raises(DataError, match=r"data.image_token = 300 is not in the vocabulary of 257"):
        prepare(section(tmp_path, image_token=300), 64)
    with pytest.raises(DataError, match=r"line 1: a text has the token data.image_token = 97"):
        prepare(section(tmp_path, image_token=ord("a")), 64)


def test_pillow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw.write(tmp_path, 16)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ConfigError, match="needs Pillow; run pip install pillow"):
        prepare(section(tmp_path), 64)
