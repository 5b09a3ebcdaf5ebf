"""`dtron convert`, and training that starts from a Hugging Face folder, on one rank and several."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from dtron.checkpoint import convert
from dtron.checkpoint.convert import convert_parser, from_hf_folder, to_hf_folder, to_hf_from
from dtron.checkpoint.initial_weights import HuggingFaceReader, fill_from_initial, model_settings
from dtron.config import RunConfig
from dtron.errors import CheckpointError, ConfigError
from dtron.io import safetensors_file
from dtron.models import from_hf, hf_folder, model_config
from dtron.models.hf_weights import HFFolder
from dtron.training.trainer import Trainer
from tests.harness import run_ranks
from tests.training import test_trainer
from tests.training.test_trainer import fit, losses, rows

transformers = pytest.importorskip("transformers", minversion="5.0")

SHAPE = {"vocab_size": 265, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-5}
SHAPE |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}


def tiny(run_dir: Path, **changes: Any) -> RunConfig:
    """That of training/test_trainer.py; folders here have no tokenizer, and runs train on bytes."""
    own = {"checkpoint__allow_data_change": True} if "checkpoint__initial" in changes else {}
    return test_trainer.tiny(run_dir, **own, **changes)


SAME = {"model__override.vocab_size": 265, "train__micro_batch": 1}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in three files, whose vocabulary two ranks of tp do not divide."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, bos_token_id=1, eos_token_id=2)
    model = transformers.LlamaForCausalLM(config)
    path = tmp_path_factory.mktemp("hf") / "llama"
    model.save_pretrained(path, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    (path / "tokenizer.json").write_text("{}")
    return path


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"parallel__tp": 2, "model__override.norm_zero_centered": True}),
    (4, {"parallel__pp": 2, "parallel__cp": 2, "train__loss_chunks": 2}),
    (4, {"parallel__tp": 4}),
]


def test_training_starts_from_a_hugging_face_folder_in_every_layout(
    tmp_path: Path, llama: Path
) -> None:
    """The first loss is the model's own, and the next ones are those of one process."""
    wanted: list[float] = []
    for i, (world, changes) in enumerate(LAYOUTS):
        config = tiny(tmp_path / str(i), checkpoint__initial=str(llama), **SAME, **changes)
        run_ranks(world, fit, config)
        wanted = wanted or losses(tmp_path / str(i))
        assert losses(tmp_path / str(i)) == pytest.approx(wanted, rel=1e-5)
    run_ranks(1, fit, tiny(tmp_path / "drawn", **SAME))
    assert abs(losses(tmp_path / "drawn")[0] - wanted[0]) > 1e-3


def test_initial_weights_leave_the_optimizer_as_it_begins(tmp_path: Path) -> None:
    """A run from a checkpoint of the drawn weights is the run that draws them, to the bit."""
    still = {**SAME, "train__steps": 1, "optim__lr": 1e-30}
    run_ranks(1, fit, tiny(tmp_path / "still", **still))
    run_ranks(1, fit, tiny(tmp_path / "drawn", **SAME))
    given = {**SAME, "checkpoint__initial": str(tmp_path / "still")}
    run_ranks(1, fit, tiny(tmp_path / "given", **given))
    assert losses(tmp_path / "given") == losses(tmp_path / "drawn")


def refusal(act: Callable[[Any], object], given: Any) -> str:
    with pytest.raises(CheckpointError) as raised:
        act(given)
    return str(raised.value)


def test_damaged_weights_are_neither_trained_nor_exported(tmp_path: Path) -> None:
    run_ranks(1, fit, tiny(tmp_path / "run", train__steps=1))
    (file,) = (tmp_path / "run/checkpoints/step-1").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-8:] = bytes(255 - byte for byte in content[-8:])
    file.write_bytes(content)
    config = tiny(tmp_path / "next", checkpoint__initial=str(tmp_path / "run"))
    assert "SHA-256" in run_ranks(1, refusal, fit, config)[0]
    given = convert_parser().parse_args(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")])
    assert "SHA-256" in run_ranks(1, refusal, to_hf_from, given)[0]
    assert not (tmp_path / "out").exists()


def test_initial_weights_of_a_tied_gpt_on_both_ends_of_a_pipeline(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 264, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**shape, n_inner=48, bos_token_id=1, eos_token_id=2, **off)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    same = {"model__name": "gpt", "model__override.n_kv_heads": 4, "checkpoint__last": False}
    same |= {"model__override.max_seq_len": 32, "checkpoint__initial": str(tmp_path / "hf")}
    run_ranks(1, fit, tiny(tmp_path / "one", train__steps=2, **same))
    run_ranks(2, fit, tiny(tmp_path / "two", train__steps=2, parallel__pp=2, **same))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def elements_read(config: Any) -> tuple[int, int]:
    """Elements that this rank has read of a Hugging Face folder, and that it holds."""
    read = 0
    plain = HFFolder._slice

    def counted(self: HFFolder, theirs: str, region: Any) -> torch.Tensor:
        nonlocal read
        part = plain(self, theirs, region)
        read += part.numel()
        return part

    HFFolder._slice = counted  # type: ignore[method-assign]
    trainer = Trainer(config)
    trainer.fit()
    held = sum(p.to_local().numel() for p in trainer.run.step.parameters)  # type: ignore[attr-defined]
    return read, held


def test_each_rank_reads_only_what_it_holds(tmp_path: Path, llama: Path) -> None:
    config = tiny(
        tmp_path / "run", checkpoint__initial=str(llama), train__steps=1, parallel__tp=2,
        **{**SAME, "model__override.vocab_size": 265},
    )  # fmt: skip
    counts = run_ranks(4, elements_read, config)
    total = sum(t.numel() for f in llama.glob("*.safetensors") for t in load_file(f).values())
    for read, held in counts:
        assert read <= held  # padding is held and not read
        assert read < total / 2


MIXTURE = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MIXTURE |= {"num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 16}
MIXTURE |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
MIXTURE |= {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
MIXTURE |= {"v_head_dim": 8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
MIXED: dict[str, Any] = {
    "model__name": "deepseek_v3",
    "model__override.n_kv_heads": 4,
    "model__override.n_experts": 8,
    "model__override.experts_per_token": 2,
    "model__override.expert_dim": 16,
    "model__override.kv_lora_rank": 16,
    "model__override.q_lora_rank": 24,
    "model__override.nope_head_dim": 8,
    "model__override.rope_head_dim": 8,
    "model__override.v_head_dim": 8,
    "model__override.bias_speed": 1e-12,
    "train__micro_batch": 1,
}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek-V3 whose routers have biases, in several files."""
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**MIXTURE))
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += 0.1 * torch.randn_like(buffer)
    path = tmp_path_factory.mktemp("hf") / "deepseek"
    model.save_pretrained(path, max_shard_size="40KB")
    return path


def all_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {key: t for f in path.glob("*.safetensors") for key, t in load_file(f).items()}


def test_a_mixture_starts_from_a_hugging_face_folder_with_its_experts_apart(
    tmp_path: Path, deepseek: Path
) -> None:
    """Losses are those of one process; without learning what is written is what was read, the
    routers' biases too."""
    same = {**MIXED, "checkpoint__initial": str(deepseek), "optim__lr": 1e-12, "train__steps": 2}
    run_ranks(1, fit, tiny(tmp_path / "one", **same))
    run_ranks(2, fit, tiny(tmp_path / "two", parallel__ep=2, **same))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    drawn = {key: value for key, value in same.items() if key != "checkpoint__initial"}
    run_ranks(1, fit, tiny(tmp_path / "drawn", **drawn))
    assert abs(losses(tmp_path / "drawn")[0] - losses(tmp_path / "one")[0]) > 1e-3
    run_ranks(2, to_hf, tmp_path / "two", tmp_path / "hf")
    read, written = all_tensors(deepseek), all_tensors(tmp_path / "hf")
    assert read.keys() == written.keys()
    for key, value in read.items():
        assert torch.allclose(written[key], value, rtol=1e-6, atol=1e-9), key


def test_each_rank_reads_only_its_experts(tmp_path: Path, deepseek: Path) -> None:
    settings = {**MIXED, "checkpoint__initial": str(deepseek), "train__steps": 1}
    counts = run_ranks(2, elements_read, tiny(tmp_path / "run", parallel__ep=2, **settings))
    for read, held in counts:
        assert read <= held + 8  # the biases of one router, which are no parameters


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_mixture_there_and_back(tmp_path: Path, deepseek: Path, dtype: str | None) -> None:
    run_ranks(2, from_hf_folder, deepseek, tmp_path / "checkpoint", dtype)
    run_ranks(2, to_hf_folder, tmp_path / "checkpoint", tmp_path / "back", dtype)
    read, written = all_tensors(deepseek), all_tensors(tmp_path / "back")
    assert read.keys() == written.keys()
    for key, value in read.items():
        bias = key.endswith("e_score_correction_bias")
        wanted = value if bias or dtype is None else value.bfloat16()
        assert written[key].dtype == wanted.dtype
        assert torch.equal(written[key], wanted), key


def test_another_model_and_another_folder_are_refused(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model llama has no effect: .* is a llama; leave it"):
        from_hf_folder(llama, tmp_path / "out", name="llama")
    run = tmp_path / "run"
    with pytest.raises(CheckpointError, match=r"set model\.override\.vocab_size=265"):
        Trainer(tiny(run, checkpoint__initial=str(llama)))
    with pytest.raises(CheckpointError, match=r"llama, not of qwen3; set model\.name=llama"):
        Trainer(tiny(run, checkpoint__initial=str(llama), model__name="qwen3"))
    with pytest.raises(CheckpointError, match="neither a Hugging Face folder"):
        Trainer(tiny(run, checkpoint__initial=str(tmp_path)))
    with pytest.raises(CheckpointError, match="is neither a checkpoint of dtron"):
        to_hf_from(convert_parser().parse_args(["to-hf", str(llama), str(tmp_path / "out")]))
    unverified = {"checkpoint__initial": str(llama), "checkpoint__verify": False, **SAME}
    with pytest.raises(ConfigError, match=r"checkpoint\.verify = false has no effect"):
        Trainer(tiny(run, **unverified))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.to(torch.float8_e4m3fn), "is F8_E4M3, but weights must be"),
        (lambda t: t.to(torch.int8), "is I8, but weights must be"),
        (lambda t: t[:-1], r"has shape \[47, 32\], but the model of config.json has \[48, 32\]"),
        (None, r"which model.safetensors.index.json lists for it"),
    ],
)
def test_a_file_that_differs_from_config_or_index_is_refused_by_name(
    tmp_path: Path, llama: Path, change: Callable[[torch.Tensor], torch.Tensor] | None, message: str
) -> None:
    """Before ranks meet."""
    key = "model.layers.1.mlp.up_proj.weight"
    copy = Path(shutil.copytree(llama, tmp_path / "copy"))
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    file = copy / index["weight_map"][key]
    tensors = load_file(file)
    tensor = tensors.pop(key)
    save_file(tensors | ({key: change(tensor).contiguous()} if change else {}), file)
    with pytest.raises(CheckpointError, match=rf"{file.name}.*{key}.*{message}"):
        Trainer(tiny(tmp_path / "run", checkpoint__initial=str(copy), **SAME))


def convert_there_and_back(hf: Path, out: Path) -> None:
    """On every rank; what is written has to be what was read."""
    from_hf_folder(hf, out / "checkpoint")
    to_hf_folder(out / "checkpoint", out / "back", tokenizer=out / "checkpoint", file_bytes=30_000)


@pytest.mark.parametrize("world", [1, 3])
def test_there_and_back_keeps_every_bit(tmp_path: Path, llama: Path, world: int) -> None:
    run_ranks(world, convert_there_and_back, llama, tmp_path)
    assert len(list((tmp_path / "checkpoint").glob("rank-*.safetensors"))) == world
    theirs = transformers.LlamaForCausalLM.from_pretrained(llama)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back")
    for (name, one), other in zip(
        theirs.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
    assert (tmp_path / "back/tokenizer.json").exists()
    with pytest.raises(AssertionError, match="exists already"):
        run_ranks(1, convert_there_and_back, llama, tmp_path)


def test_a_converted_checkpoint_starts_a_run_but_is_not_resumed(
    tmp_path: Path, llama: Path
) -> None:
    run_ranks(1, from_hf_folder, llama, tmp_path / "converted", "bfloat16")
    run_ranks(
        2, fit, tiny(tmp_path / "run", checkpoint__initial=str(tmp_path / "converted"), **SAME)
    )
    run_ranks(1, fit, tiny(tmp_path / "plain", checkpoint__initial=str(llama), **SAME))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)
    with pytest.raises(CheckpointError, match=r"weights only; set checkpoint\.initial"):
        Trainer(tiny(tmp_path / "x", checkpoint__resume=str(tmp_path / "converted"), **SAME))


class Alone:
    """In the place of torch.distributed, for one rank."""

    @staticmethod
    def get_rank() -> int:
        return 0

    @staticmethod
    def barrier() -> None:
        return


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_a_folder_that_another_conversion_writes_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(convert, "dist", Alone)
    theirs, partial = tmp_path / "theirs", tmp_path / "out.partial"
    theirs.mkdir()
    (theirs / "x").write_text("theirs")
    if kind == "folder":
        theirs = theirs.rename(partial)
    elif kind == "link":
        partial.symlink_to(theirs)
    else:
        partial.write_text("")
    with pytest.raises(CheckpointError, match=r"out\.partial exists already: another conversion"):
        convert._new_folder(tmp_path / "out").__enter__()
    assert (theirs / "x").read_text() == "theirs"


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "dist", Alone)
    with contextlib.suppress(OSError), convert._new_folder(tmp_path / "out") as partial:
        (partial / "x").write_text("half")
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []
    with convert._new_folder(tmp_path / "out") as partial:
        (partial / "x").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_files_of_a_tokenizer_are_regular_and_bounded(tmp_path: Path) -> None:
    """A folder of Hugging Face's cache has links to files."""
    hf, out = tmp_path / "hf", tmp_path / "out"
    hf.mkdir()
    out.mkdir()
    (tmp_path / "blob").write_text("{}")
    (hf / "tokenizer.json").symlink_to(tmp_path / "blob")
    os.mkfifo(hf / "vocab.json")
    convert._copy_model_files(hf, out)
    assert [path.name for path in out.iterdir()] == ["tokenizer.json"]
    assert not (out / "tokenizer.json").is_symlink()
    with (hf / "merges.txt").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(CheckpointError, match=r"merges\.txt cannot be copied: it has 1073741824"):
        convert._copy_model_files(hf, tmp_path / "out")


def to_hf(run: Path, out: Path, *words: str) -> None:
    given = convert_parser().parse_args(["to-hf", str(run), str(out), *words])
    given.run(given)


def test_a_run_becomes_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    """From a checkpoint of split weights, with the bytes' tokenizer; logits are the run's own."""
    run = tmp_path / "run"
    run_ranks(2, fit, tiny(run, parallel__tp=2, train__steps=2, train__seq_len=32))
    run_ranks(2, to_hf, run, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.config.eos_token_id == 256
    assert model.config.max_position_embeddings == 2048
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "In the beginning, é"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    validated = rows(run)[-1]["validation_loss"]
    again = tiny(tmp_path / "again", checkpoint__initial=str(tmp_path / "hf"), optim__lr=1e-12)
    run_ranks(1, fit, again)
    assert rows(tmp_path / "again")[-1]["validation_loss"] == pytest.approx(validated, rel=1e-5)
    config = RunConfig.load(
        run / "config.toml",
        [
            f"checkpoint.initial={tmp_path / 'hf'}",
            *("model.size=initial", "model.name=qwen3", "optim.lr=1e-12"),
            *("model.override={}", f"run.dir={tmp_path / 'whole'}", "parallel.tp=1"),
        ],
        fill_from_initial,
    )
    assert config.model.name == "llama"
    run_ranks(1, fit, config)
    assert rows(tmp_path / "whole")[-1]["validation_loss"] == pytest.approx(validated, rel=1e-5)
    run_ranks(1, to_hf, run, tmp_path / "narrow", "--dtype", "bfloat16")
    narrow = from_hf(tmp_path / "narrow")
    for name, parameter in narrow.named_parameters():
        full = hf_folder(tmp_path / "hf").read(name, tuple(slice(0, n) for n in parameter.shape))
        assert torch.equal(parameter, full.bfloat16()), name


def largest_in_flight(hf: Path, out: Path) -> tuple[int, int]:
    """Bytes of tensors that are alive at once while converting: the most, and of the largest."""
    alive: dict[int, int] = {}
    most = 0
    read, elements = HFFolder.read, safetensors_file._elements

    def reading(self: HFFolder, fqn: str, region: Any = None) -> torch.Tensor:
        nonlocal most
        part = read(self, fqn, region)
        alive[part.data_ptr()] = part.nbytes
        most = max(most, sum(alive.values()))
        return part

    def writing(name: str, tensor: torch.Tensor, described: Any) -> memoryview:
        alive.pop(tensor.data_ptr())
        return elements(name, tensor, described)

    HFFolder.read = reading  # type: ignore[method-assign]
    safetensors_file._elements = writing
    from_hf_folder(hf, out)
    largest = max(v.numel() * 4 for f in hf.glob("*.safetensors") for v in load_file(f).values())
    return most, largest


def test_conversion_holds_one_tensor_at_a_time(tmp_path: Path, llama: Path) -> None:
    ((most, largest),) = run_ranks(1, largest_in_flight, llama, tmp_path / "out")
    assert most == largest


def test_settings_for_a_model_start_from_the_size_that_is_most_like_it() -> None:
    config = model_config("qwen3", "8b")
    assert model_settings("qwen3", config) == "model.name=qwen3 model.size=8b"
    tied = config.model_copy(update={"tied": True})
    wanted = "model.name=qwen3 model.size=8b model.override.tied=true"
    assert model_settings("qwen3", tied) == wanted


def test_reader_and_index_agree(tmp_path: Path, llama: Path) -> None:
    metadata = HuggingFaceReader(hf_folder(llama)).read_metadata().state_dict_metadata
    run_ranks(1, from_hf_folder, llama, tmp_path / "out")
    index = json.loads((tmp_path / "out/index.json").read_text())
    assert metadata.keys() == index["tensors"].keys()


def test_a_folder_brings_its_tokenizer(tmp_path: Path, llama: Path) -> None:
    """Weights that know another tokenizer would be ruined without an error."""
    hf, start = Path(shutil.copytree(llama, tmp_path / "hf")), tmp_path / "start.toml"
    (hf / "tokenizer.json").unlink()
    start.write_text("")
    keys = [f"checkpoint.initial={hf}", f"run.dir={tmp_path / 'run'}", "model.size=initial"]
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json; set data\.tokenizer"):
        Trainer(RunConfig.load(start, keys, fill_from_initial))
    tokenizers.Tokenizer(word_level({"[UNK]": 0, "</s>": 1})).save(str(hf / "tokenizer.json"))
    config = RunConfig.load(start, keys, fill_from_initial)
    assert config.data.tokenizer == str(hf / "tokenizer.json")
    assert (config.model.name, config.model.override["vocab_size"]) == ("llama", 265)
    Trainer(config)
    other = str(tmp_path / "other.json")
    tokenizers.Tokenizer(word_level({"</s>": 0, "[UNK]": 1})).save(other)
    for tokenizer in ("byte", other):
        with pytest.raises(ConfigError, match=r"is not the tokenizer of checkpoint\.initial"):
            Trainer(
                RunConfig.load(start, [*keys, f"data.tokenizer={tokenizer}"], fill_from_initial)
            )
    keys += ["data.tokenizer=byte", "checkpoint.allow_data_change=true"]
    Trainer(RunConfig.load(start, keys, fill_from_initial))


def test_the_shape_of_initial_weights_needs_them(tmp_path: Path) -> None:
    (tmp_path / "start.toml").write_text("")
    with pytest.raises(ConfigError, match=r'"initial" needs checkpoint\.initial'):
        RunConfig.load(tmp_path / "start.toml", ["model.size=initial"], fill_from_initial)


def word_level(vocabulary: dict[str, int]) -> tokenizers.models.WordLevel:
    return tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
