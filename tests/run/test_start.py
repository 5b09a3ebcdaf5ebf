"""What a start costs: the phases that are logged, and the cache of compiled graphs."""

import os
import re
from pathlib import Path

import pytest

from benchmarks import start_times
from dtron.bench.run import Options, bench_config
from dtron.errors import ConfigError
from dtron.run.process import use_compile_cache

ROOT = Path(__file__).resolve().parents[2]


def test_the_folder_of_compiled_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, "unchanged")
    use_compile_cache("")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "unchanged"
    monkeypatch.chdir(tmp_path)
    use_compile_cache("graphs")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "graphs")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "graphs/triton")
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"compile\.cache_dir = 'file/x' cannot be written: Not a"
    ):
        use_compile_cache("file/x")


def test_ranks_make_the_folder_of_compiled_graphs_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, "")
    write, folder = Path.write_bytes, tmp_path / "new/graphs"

    def with_another_rank(path: Path, data: bytes) -> int:
        write(folder / "file of another rank", data)
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", with_another_rank)
    use_compile_cache(str(folder))
    assert [file.name for file in folder.iterdir()] == ["file of another rank"]
    monkeypatch.undo()
    use_compile_cache(str(tmp_path / "empty"))
    assert (tmp_path / "empty").is_dir()  # a rank that removed it would fail the others


def test_a_fresh_cache_of_the_bench_is_not_the_configs(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[compile]\nenable = true\ncache_dir = '/kept'\n", encoding="utf-8")
    for fresh, folder in ((False, "/kept"), (True, "")):
        config, _ = bench_config(file, [], Options(1, fresh_cache=fresh), tmp_path / "run")
        assert config.compile.cache_dir == folder


def test_a_second_start_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["--config", "configs/quickstart.toml", "--nproc-per-node", "2", "--warm", "1"]
    words += ["train.seq_len=64", "train.global_batch=2", "train.micro_batch=1"]
    start_times.main([*words, f"data.cache_dir={tmp_path}"])
    cold, warm = capsys.readouterr().out.splitlines()
    phases = r"imports, .* rendezvous, .* data, .* model, .* checkpoint, .* first step"
    assert re.search(rf"first step in .*: .* {phases}", cold)
    assert re.search(r"\([1-9]\d* graphs compiled, ", cold)
    assert re.search(r"\(0 graphs compiled, [1-9]\d* from the cache\)", warm)
