"""`dtron eval` and `dtron generate`."""

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtron import cli
from dtron.checkpoint.convert import from_hf_folder, to_hf_folder
from dtron.config import Data
from dtron.data.images import draw
from dtron.data.images.files import read_image
from dtron.data.objectives.spans import decode_spans, encode_prompt
from dtron.data.tokenizer import ByteTokenizer
from dtron.inference.loaded_model import config_of, load
from dtron.inference.scores import Continuation, score
from dtron.models import from_hf, to_hf
from dtron.models.config import DecoderConfig
from dtron.models.encoder_decoder import EncoderDecoder, greedy
from dtron.run.process import Place
from tests.harness import run_ranks
from tests.models.build import initialized, small_config, varied
from tests.training.test_trainer import fit, rows, tiny

Output = Callable[[], str]
PROMPT = ("--prompt", "In the", "--tokens", "12", "--temperature", "0")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps."""
    path = tmp_path_factory.mktemp("inference") / "run"
    run_ranks(1, fit, tiny(path, optim__lr=1e-2))
    return path


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Output:
    return lambda: capsys.readouterr().out


def of_rank_0(words: list[str], file: Path) -> None:
    """On one of several ranks: run a command; keep what rank 0 prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.commands(words) == 0
    text = out.getvalue()
    assert bool(text) == (dist.get_rank() == 0)
    if text:
        file.write_text(text)


def test_the_loss_is_that_of_the_run(run: Path, output: Output) -> None:
    assert cli.commands(["eval", "--json", str(run)]) == 0
    (logged,) = [row["validation_loss"] for row in rows(run) if "validation_loss" in row]
    assert json.loads(output()) == {"validation_loss": pytest.approx(logged, rel=1e-6)}
    assert cli.commands(["eval", str(run / "checkpoints" / "step-6")]) == 0
    assert output().startswith(f"validation_loss  {logged:.4f}  perplexity ")


def test_training_data_of_which_nothing_is_held_out_is_not_read(
    run: Path, tmp_path: Path, output: Output
) -> None:
    (tmp_path / "own.txt").write_text("In the beginning God created. " * 60, encoding="utf-8")
    named = f'data.validation=[{{name = "own", paths = ["{tmp_path / "own.txt"}"]}}]'
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    words = ['data.paths=["gone.jsonl"]', "data.validation_fraction=0", named, cache]
    assert cli.commands(["eval", "--json", str(run), *words]) == 0
    assert json.loads(output()).keys() == {"validation_loss", "validation_loss/own"}


@pytest.mark.parametrize("layout", ["parallel.tp=2", "parallel.pp=2", "parallel.cp=2"])
def test_layouts_give_the_same(run: Path, tmp_path: Path, output: Output, layout: str) -> None:
    for command in (["eval", "--json", str(run)], ["generate", str(run), *PROMPT]):
        assert cli.commands(command) == 0
        run_ranks(2, of_rank_0, [*command, layout], tmp_path / "out")
        text, wanted = (tmp_path / "out").read_text(), output()
        if command[0] == "eval":
            assert json.loads(text) == pytest.approx(json.loads(wanted), rel=1e-5)
        else:
            assert text == wanted


TEXTS = [Continuation(list(range(n)), scored) for n, scored in [(3, 1), (33, 32), (20, 7)]]


def scores_of(words: list[str]) -> list[tuple[float, bool]]:
    """On each rank: the scores of TEXTS and of one whose last token is the most likely one."""
    config = config_of(words[0], None, words[1:], dist.get_world_size())
    loaded = load(config, Place.of_environment(), validation=False)
    text = loaded.generate("In the", 1, (1, 32), 0, 0.0)
    likely = Continuation(list(text.encode()), 1)
    return score(loaded, [*TEXTS, likely])


def scores_of_module(run: Path) -> list[tuple[float, bool]]:
    """The scores of TEXTS by the unsharded module."""
    to_hf_folder(run / "checkpoints" / "step-6", run / "hf")
    model = from_hf(run / "hf", attention="math")
    found = []
    for text in TEXTS:
        tokens = torch.tensor([text.tokens])
        likelihoods = model(tokens[:, :-1]).log_softmax(-1)[0, -text.n_scored :]
        labels = tokens[0, -text.n_scored :]
        greedy = bool((likelihoods.argmax(-1) == labels).all())
        found.append((likelihoods.gather(1, labels[:, None]).sum().item(), greedy))
    return found


@pytest.mark.parametrize("layout", ["parallel.tp=2", "parallel.pp=2", "parallel.cp=2", "dp"])
def test_scores_are_those_of_the_module_in_every_layout(
    run: Path, tmp_path: Path, layout: str
) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    (wanted,) = run_ranks(1, scores_of_module, copied)
    layouts = [] if layout == "dp" else [layout]
    for found in run_ranks(2, scores_of, [str(run), *layouts]):
        assert found[-1][1]
        assert [greedy for _, greedy in found[:-1]] == [greedy for _, greedy in wanted]
        assert [x for x, _ in found[:-1]] == pytest.approx([x for x, _ in wanted], rel=1e-5)


def test_text_is_that_of_the_exported_weights(run: Path, tmp_path: Path, output: Output) -> None:
    assert cli.commands(["convert", "to-hf", str(run), str(tmp_path / "exported")]) == 0
    output()
    assert cli.commands(["generate", str(run), *PROMPT]) == 0
    of_run = output()
    folder = [str(tmp_path / "exported"), "train.dtype=float32", "train.seq_len=32"]
    assert cli.commands(["generate", *folder, *PROMPT]) == 0
    assert output() == of_run
    assert of_run.startswith("In the")
    assert len(of_run.encode()) <= len("In the") + 12 + len("\n")


def test_seeds_draw_other_texts(run: Path, output: Output) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        words = ["--prompt", "In the", "--tokens", "12", "--seed", seed]
        assert cli.commands(["generate", str(run), *words]) == 0
        texts.append(output())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "RUN", "train.eval_sequences=0"], "set train.eval_sequences above 0"),
        (["eval", "RUN", "parallel.tp=2"], "parallel.tp"),
        (["eval", "ALONE"], "name a config with --config FILE"),
        (["eval", "nowhere"], "neither a Hugging Face folder"),
        (["generate", "RUN"], "--prompt"),
        (["generate", "RUN", "--prompt", "x", "--temperature", "nan"], "use 0 or more"),
        (["eval", "RUN", "optim.lr=5"], "optim.lr: no effect without training"),
        (["eval", "RUN", "train.steps=9"], "train.steps: no effect without training"),
        (["eval", "RUN", "--limit", "3"], "--limit has no effect without --tasks"),
        (["eval", "RUN", "checkpoint.initial=other"], "checkpoint.initial: no effect"),
    ],
)
def test_what_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    names = {"RUN": str(run), "ALONE": str(tmp_path / "step-6")}
    if "ALONE" in words:
        shutil.copytree(run / "checkpoints" / "step-6", tmp_path / "step-6")
    assert cli.commands([names.get(word, word) for word in words]) == 1
    assert message in capsys.readouterr().err


def test_a_run_may_not_choose_which_code_runs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    config = (copied / "config.toml").read_text()
    (copied / "config.toml").write_text(config.replace('name = "llama"', 'name = "theirs:SPEC"'))
    (tmp_path / "theirs.py").write_text("raise SystemExit('their code ran')")
    monkeypatch.chdir(tmp_path)
    for size in ("initial", "debug"):
        text = (copied / "config.toml").read_text()
        (copied / "config.toml").write_text(re.sub('size = ".*"', f'size = "{size}"', text))
        assert cli.commands(["eval", str(copied)]) == 1
        assert "whose code runs only if you name it; add model.name=theirs:SPEC" in (
            capsys.readouterr().err
        )
    assert cli.commands(["eval", str(copied), "model.name=theirs:SPEC"]) == 1
    assert "their code ran" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], destroyed: None
) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    shard = next((copied / "checkpoints" / "step-6").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert cli.commands(["eval", str(copied)]) == 1
    assert "step-6" in capsys.readouterr().err


@pytest.fixture
def destroyed() -> Iterator[None]:
    """The process group, which a command leaves after an error, is destroyed."""
    yield
    dist.destroy_process_group()


def test_layers_of_two_kinds_write_their_most_likely_tokens(tmp_path: Path, output: Output) -> None:
    """Gemma 4, beyond its window: as of the module, by the whole text each time."""
    config = small_config("gemma4", vocab_size=264)
    model = varied(initialized("gemma4", config)).eval()
    to_hf(model, tmp_path / "hf", name="gemma4")
    run_ranks(1, from_hf_folder, tmp_path / "hf", tmp_path / "checkpoint")
    keys = ["--config", "configs/gemma4_debug.toml", "model.size=initial", "--prompt", "In the"]
    words = [str(tmp_path / "checkpoint"), *keys, "--tokens", "8", "--temperature", "0"]
    assert cli.commands(["generate", *words]) == 0
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("In the")
    start = len(ids)
    for _ in range(8):
        ids = [*ids, int(model(torch.tensor([ids]))[0, -1].argmax())]
    assert tokenizer.decode(ids[start:]) in output()


def test_a_decoder_writes_what_an_encoder_has_read(tmp_path: Path, output: Output) -> None:
    """The most likely tokens, as of the module; sentinels are written out."""
    config = small_config("t5", vocab_size=320)
    to_hf(varied(initialized("t5", config)), tmp_path / "hf", name="t5")
    text, words = "a <extra_id_0> b", ["--tokens", "6", "--temperature", "0"]
    run_ranks(1, from_hf_folder, tmp_path / "hf", tmp_path / "checkpoint")
    keys = ["--config", "configs/t5_debug.toml", "model.size=initial"]
    words = [str(tmp_path / "checkpoint"), *keys, "--prompt", text, *words]
    assert cli.commands(["generate", *words]) == 0
    model, data, tokenizer = from_hf(tmp_path / "hf"), Data(), ByteTokenizer()
    assert isinstance(model, EncoderDecoder)
    read = torch.tensor([encode_prompt(text, data, tokenizer, 320)])
    ids = greedy(model, read, 6, tokenizer.eos_id)[0].tolist()
    ids = ids[: ids.index(tokenizer.eos_id)] if tokenizer.eos_id in ids else ids
    assert output() == decode_spans(ids, data, tokenizer, 320) + "\n"


def vision_words(folder: Path, config: DecoderConfig) -> list[str]:
    """The arguments that name weights and config of a model in folder/hf."""
    sizes = (
        f"data.image_size={config.vision_image_size}",
        f"data.image_tokens={config.image_tokens}",
    )
    run_ranks(1, from_hf_folder, folder / "hf", folder / "checkpoint")
    keys = ["model.size=initial", "train.dtype=float32", "train.seq_len=64"]
    return [str(folder / "checkpoint"), "--config", "configs/vlm_debug.toml", *keys, *sizes]


@pytest.mark.parametrize("layout", ["", "parallel.tp=2", "parallel.cp=2", "parallel.pp=2"])
def test_images_of_a_prompt_are_read(tmp_path: Path, layout: str) -> None:
    """The most likely tokens after two images, as of the module."""
    config = small_config("llava", vocab_size=258, image_token=255)
    model = varied(initialized("llava", config))
    to_hf(model, tmp_path / "hf", name="llava")
    draw.write(tmp_path, 2)
    files, prompt = [str(tmp_path / f"{i}.png") for i in range(2)], "a<image>bc<image>d"
    size, per_image = config.vision_image_size, config.image_tokens
    words = vision_words(tmp_path, config)
    words += ["--prompt", prompt, "--tokens", "6", "--temperature", "0", *layout.split()]
    words += ["--image", files[0], "--image", files[1]]
    run_ranks(2 if layout else 1, of_rank_0, ["generate", *words], tmp_path / "out")
    images = torch.stack([torch.tensor(read_image(each, "", size)) for each in files])
    ids = [*b"a", *[255] * per_image, *b"bc", *[255] * per_image, *b"d"]
    start = len(ids)
    index = [(i, p) for i in range(2) for p in range(per_image)]
    for _ in range(6):
        tokens = torch.tensor([ids])
        places = torch.full((*tokens.shape, 2), -1)
        places[tokens == 255] = torch.tensor(index)
        logits = model(tokens, images=images, image_index=places)[0, -1, :257]
        ids.append(int(logits.argmax()))
    ids = ids[start:]
    ids = ids[: ids.index(ByteTokenizer().eos_id)] if ByteTokenizer().eos_id in ids else ids
    assert (tmp_path / "out").read_text() == prompt + ByteTokenizer().decode(ids) + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a<image>"], "has 1 times <image>, but --image was given 0"),
        (["--prompt", "a<image>", "--image", "gone.png"], "gone.png: No such file"),
        (["--prompt", "a", "--image", "a.png"], "model.name = llama reads no images"),
    ],
)
@pytest.mark.usefixtures("destroyed")
def test_images_that_do_not_fit_are_refused(
    run: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = [str(run)]
    if "llama" not in message:
        config = small_config("llava", vocab_size=258, image_token=255)
        to_hf(initialized("llava", config), tmp_path / "hf", name="llava")
        weights = vision_words(tmp_path, config)
    assert cli.commands(["generate", *weights, *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("destroyed")
def test_an_encoder_of_text_reads_no_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to_hf(initialized("t5", small_config("t5", vocab_size=320)), tmp_path / "hf", name="t5")
    run_ranks(1, from_hf_folder, tmp_path / "hf", tmp_path / "checkpoint")
    words = ["--config", "configs/t5_debug.toml", "model.size=initial", "--prompt", "a"]
    words = [str(tmp_path / "checkpoint"), *words, "--image", "a.png"]
    assert cli.commands(["generate", *words]) == 1
    assert "model.name = t5 reads no images" in capsys.readouterr().err


def test_samples_of_a_vision_model_take_the_placeholder_as_text(tmp_path: Path) -> None:
    """A run does not stop since its `train.sample_prompt` has one."""
    config = small_config("llava", vocab_size=258, image_token=255)
    to_hf(initialized("llava", config), tmp_path / "hf", name="llava")
    (text,) = run_ranks(1, sampled, vision_words(tmp_path, config))
    assert text.startswith("a<image>")


def sampled(words: list[str]) -> str:
    """What a model writes, with the arguments of a run's samples."""
    config = config_of(words[0], Path(words[2]), words[3:], 1)
    loaded = load(config, Place.of_environment(), validation=False)
    return loaded.generate("a<image>", 2, (1, 64), 0)
