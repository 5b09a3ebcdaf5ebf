"""Files as large as those of real models, made as sparse files: bounds of what may be damaged leave
room for them."""

import json
from pathlib import Path

import pytest
import torch

from dtron.checkpoint.dcp_storage import read_index
from dtron.io.safetensors_file import StoredTensors, parse_shape, parse_sizes

_GB = 2**30


@pytest.mark.parametrize("before", [1, 3, 40, 3000], ids=lambda n: f"behind {n} GB")
def test_a_tensor_far_inside_a_file_is_read(tmp_path: Path, before: int) -> None:
    path = tmp_path / "model.safetensors"
    end = before * _GB
    header = json.dumps(
        {
            "first": {"dtype": "BF16", "shape": [before, _GB // 2], "data_offsets": [0, end]},
            "last": {"dtype": "F32", "shape": [3], "data_offsets": [end, end + 12]},
        }
    ).encode()
    wanted = torch.tensor([1.0, 2.0, 3.0])
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(end, 1)  # a hole
        file.write(wanted.numpy().tobytes())
    stored = StoredTensors(path)
    assert torch.equal(stored.get_slice("last")[()], wanted)
    assert stored.get_slice("first").shape == [before, _GB // 2]


def test_an_index_of_a_large_model_is_read(tmp_path: Path) -> None:
    """Two parts of an expert's weights; the offsets are no shape of a tensor."""
    shape, half = [2**20, 2**16, 2**16], 2**19
    parts = [[[0, 0, 0], [half, *shape[1:]], "a"], [[half, 0, 0], [half, *shape[1:]], "b"]]
    tensors = {"w": {"dtype": "BF16", "shape": shape, "parts": parts}}
    size = {"bytes": 2**53, "sha256": "0" * 64}
    index = {"format": 1, "files": {"a": size, "b": size}, "tensors": tensors}
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert list(read_index(tmp_path).tensors["w"].size) == shape


def test_offsets_are_bounded_one_by_one_and_shapes_by_their_product() -> None:
    assert parse_sizes([2**40, 2**41]) == [2**40, 2**41]
    with pytest.raises(ValueError, match="more than 2\\^56 elements"):
        parse_shape([2**40, 2**41])
    for wrong in ([-1], [2**57], [True], [1.0], "1", [1] * 17):
        with pytest.raises(ValueError, match="integer"):
            parse_sizes(wrong)
