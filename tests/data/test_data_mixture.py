"""Mixtures of several corpora, and validation sets by name."""

import json
import logging
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtron.checkpoint.metadata import read_metadata
from dtron.config import RunConfig
from dtron.data import Loader, mixture, open_all
from dtron.data.command import main
from dtron.data.mixture import MixedSource, Mixture
from dtron.data.packing import Packed, State, TrainingSource, Waste
from dtron.errors import ConfigError, DataError
from dtron.plan.command import dry_run
from dtron.run.process import Place
from dtron.setup.preflight import preflight
from tests.harness import run_ranks
from tests.training.test_trainer import fit, losses, rows, tiny

PLACE = Place(rank=0, local_rank=0, world_size=1)
EPOCH = 10


class Numbers(TrainingSource):
    """Sequence k has the tokens [source, k]."""

    def __init__(self, source: int) -> None:
        self.source = source

    def sequence(self, k: int) -> Packed:
        tokens = np.array([self.source, k])
        return Packed(tokens, tokens, None, None)

    def state(self, k: int) -> State:
        return {}

    def seek(self, k: int, state: State) -> None:
        """Any sequence can be read at any time."""

    def waste(self) -> Waste:
        return Waste(EPOCH, 0.1 * self.source, 0.2)


def mixed(
    weights: Sequence[float | tuple[float, ...]],
    epochs: dict[int, float] | None = None,
    stages: Sequence[int] = (),
    names: str = "abcdefghij",
    global_batch: int = 1,
) -> Mixture:
    """A mixture of sources a, b, ... of EPOCH sequences each."""
    given = [each if isinstance(each, tuple) else (each,) * (len(stages) + 1) for each in weights]
    most = {i: round(EPOCH * n) for i, n in (epochs or {}).items()}
    sources = [
        MixedSource(names[i], Numbers("abcdefghij".index(names[i])), EPOCH, each, most.get(i))
        for i, each in enumerate(given)
    ]
    return Mixture(sources, global_batch, stages)


def places(found: Mixture, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """(source, number in the source) of sequences of the run."""
    return [tuple(each.tokens.tolist()) for each in found.sequences(numbers)]


def farthest(weights: Sequence[float], n: int) -> float:
    """How far a source ever is from its weight, in sequences, beyond the bound."""
    counts, total, most = Counter[int](), sum(weights), 0.0
    for k, (source, number) in enumerate(places(mixed(weights), range(n))):
        assert number == counts[source], "each source is read in its own order"
        counts[source] += 1
        far = [abs(counts[i] - (k + 1) * w / total) for i, w in enumerate(weights)]
        most = max(most, *far)
    return most - (1 - 1 / (2 * len(weights) - 2))


def drawn(seed: int) -> list[float]:
    draw = random.Random(seed)
    return [draw.random() ** 3 + 1e-3 for _ in range(draw.randint(2, 9))]


@pytest.mark.parametrize("seed", range(12))
def test_every_prefix_is_exact_to_a_sequence(seed: int) -> None:
    assert farthest(drawn(seed), 1000) <= 1e-9


@pytest.mark.parametrize(
    "wrong",
    [
        lambda shares, since: min(shares, key=since.__getitem__),  # weights are ignored
        lambda shares, since: max(shares, key=shares.__getitem__),  # the largest, always
        lambda shares, since: min(shares, key=lambda n: since[n] / shares[n]),  # behind by share
    ],
)
def test_a_wrong_choice_is_noticed(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "_chosen", wrong)
    assert max(farthest(drawn(seed), 1000) for seed in range(12)) > 1e-9


@pytest.mark.parametrize("k", [0, 1, 17, 40, 53, 64])
def test_a_resume_goes_on_as_if_it_had_not_ended(k: int) -> None:
    """Before and after a stage, and the end of a source; and back."""
    given: Any = ([0.5, (0.3, 0.1), (0.2, 0.9)], {0: 2.5}, [40])
    whole = places(mixed(*given), range(100))
    first = mixed(*given)
    assert places(first, range(k)) == whole[:k]
    state = json.loads(json.dumps(first.state(k)))
    again = mixed(*given)
    again.seek(k, state)
    assert places(again, range(k, 100)) == whole[k:]
    assert places(again, range(k, 100, 7)) == whole[k:100:7]
    assert again.state(100) == mixed(*given).state(100)


def test_stages_and_epochs_change_the_shares() -> None:
    found = places(mixed([1.0, (3.0, 0.0), (0.0, 1.0)], {0: 2}, [40]), range(80))
    counts = [Counter(source for source, _ in part) for part in (found[:40], found[40:])]
    assert counts == [{0: 10, 1: 30}, {0: 10, 2: 30}]
    assert max(number for source, number in found if source == 0) == 2 * EPOCH - 1


def test_sources_may_change_at_a_resume(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dtron")
    before = mixed([0.5, 0.5])
    state = before.state(20)
    same = mixed([1.0, 1.0])
    same.seek(20, state)
    assert not caplog.records
    changed = mixed([0.2, 0.8], names="bc")
    changed.seek(20, state)
    (record,) = caplog.records
    assert record.getMessage() == (
        "data.mixture: shares were a 50.0%, b 50.0%, and are b 20.0%, c 80.0% from step 21 on"
    )
    found = places(changed, range(20, 30))
    assert Counter(source for source, _ in found) == {1: 2, 2: 8}
    assert min(number for source, number in found if source == 1) == 10
    assert min(number for source, number in found if source == 2) == 0


def test_padding_is_that_of_the_shares() -> None:
    found = mixed([0.25, 0.75]).waste()
    assert found is not None
    assert found.sequences == 2 * EPOCH
    assert (found.padding, found.split_documents) == pytest.approx((0.075, 0.2))


def test_the_same_shares_are_not_changed(caplog: pytest.LogCaptureFixture) -> None:
    """By other weights, or in another order of the tables."""
    caplog.set_level(logging.WARNING, "dtron")
    for seed in range(30):
        weights = drawn(seed)[:5]
        names = "abcde"[: len(weights)]
        before = mixed(weights)
        state = before.state(37)
        again = mixed([10 * w for w in reversed(weights)], names=names[::-1])
        again.seek(37, state)
        assert places(again, range(37, 60)) == places(before, range(37, 60))
    assert not caplog.records


def test_a_source_that_comes_back_goes_on() -> None:
    before = mixed([0.5, 0.5])
    without = mixed([1.0], names="b")
    without.seek(20, before.state(20))
    after = mixed([0.5, 0.5])
    after.seek(24, json.loads(json.dumps(without.state(24))))
    found = places(after, range(24, 34))
    assert sorted(number for source, number in found if source == 0) == list(range(10, 15))
    assert sorted(number for source, number in found if source == 1) == list(range(14, 19))


def test_sources_that_end_too_early_are_an_error() -> None:
    with pytest.raises(DataError, match="will have had their epochs in step 31"):
        places(mixed([0.5, 0.5], {0: 1, 1: 2}), range(31))
    with pytest.raises(DataError, match="will have had their epochs in step 31"):
        mixed([0.5, 0.5], {0: 1, 1: 2}).summary(31)


@pytest.mark.parametrize("seed", range(12))
def test_sources_may_end_with_the_run(seed: int) -> None:
    """All of them; the state after the last sequence is known, and may be resumed from."""
    weights = drawn(seed)
    epochs = {i: 1 + i % 3 / 10 for i in range(len(weights))}
    n = sum(round(EPOCH * each) for each in epochs.values())
    found = mixed(weights, epochs)
    assert found.summary(n)
    assert len(set(places(found, range(n)))) == n
    state = found.state(n)
    more = {**epochs, 0: epochs[0] + 1}
    again = mixed(weights, more)
    again.seek(n, state)
    assert places(again, [n]) == [(0, EPOCH)]


def test_the_summary_counts_from_the_position() -> None:
    assert mixed([0.5, 0.5], {0: 1}).summary(40) == (
        "a 25.0% (then 1.00 epochs read), b 75.0% (then 3.00 epochs read)"
    )
    later = mixed([0.5, 0.5], {0: 1}, global_batch=2)
    later.seek(16, later.state(16))
    assert later.summary(12) == ("a 8.3% (then 1.00 epochs read), b 91.7% (then 3.00 epochs read)")


def test_stages_begin_at_steps() -> None:
    """Also where steps were counted anew by a rollback, or had other batches before."""
    found = mixed([(1.0, 0.0), (0.0, 1.0)], stages=[10], global_batch=4)
    assert [source for source, _ in places(found, range(36, 44))] == [0] * 4 + [1] * 4
    found = mixed([(1.0, 0.0), (0.0, 1.0)], stages=[10], global_batch=4)
    found.count_from(8, 48)  # step 8 was reached with 48 sequences
    found.seek(48, {})
    assert [source for source, _ in places(found, range(52, 60))] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(("dp_size", "micro_batch"), [(1, 8), (2, 2), (4, 1)])
def test_the_order_is_the_same_in_every_layout(dp_size: int, micro_batch: int) -> None:
    wanted = places(mixed([0.6, 0.3, 0.1]), range(32))
    for rank in range(dp_size):
        settings: dict[str, Any] = {"global_batch": 8, "micro_batch": micro_batch}
        loader = Loader(
            mixed([0.6, 0.3, 0.1]), dp_rank=rank, dp_size=dp_size, ahead=rank % 2, **settings
        )
        for _ in range(4):
            for batch in loader.step():
                found = [tuple(each) for each in batch.tokens.tolist()]
                assert found == [wanted[k] for k in batch.sequence.tolist()]
                sources = batch.to("cpu").sources
                assert sources is not None
                assert sources.int().argmax(1).tolist() == batch.tokens[:, 0].tolist()
                assert sources.sum(1).tolist() == [1] * micro_batch
        loader.close()
        assert loader.state_dict() == {"sequence": 32, **mixed([0.6, 0.3, 0.1]).state(32)}


@pytest.fixture
def corpora(tmp_path: Path, texts: list[str]) -> dict[str, Path]:
    """Three files of different documents."""
    found = {}
    for name, suffix in (("web", "w"), ("code", "c"), ("other", "o")):
        found[name] = tmp_path / f"{name}.jsonl"
        lines = [json.dumps({"text": f"{text}{n}{suffix}"}) for n in range(3) for text in texts]
        found[name].write_text("\n".join(lines))
    return found


def settings(corpora: dict[str, Path], **more: Any) -> dict[str, Any]:
    """Keys of a run on two of them, that validates on the third too."""
    weights = {"web": 0.75, "code": 0.25}
    sources = [
        {"name": name, "paths": [str(corpora[name])], "weight": weight}
        for name, weight in weights.items()
    ]
    sets = [{"name": "other", "paths": [str(corpora["other"])]}]
    return {"data__mixture": sources, "data__validation": sets, **more}


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_ranks_do_not_change_a_mixture(tmp_path: Path, corpora: dict, packing: str) -> None:
    """And a run that resumes under another layout logs the losses of one that does not."""
    one, two = tmp_path / "one", tmp_path / "two"
    keys = settings(corpora, data__packing=packing)
    run_ranks(1, fit, tiny(one, **keys))
    stages = 2 if packing == "best_fit" else 1
    run_ranks(2, fit, tiny(two, checkpoint__interval=3, parallel__pp=stages, **keys))
    resume = {"checkpoint__resume": str(two / "checkpoints/step-3"), "train__micro_batch": 4}
    run_ranks(1, fit, tiny(two, **keys, **resume))
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    last = rows(one)[-1]
    for row, other in zip(rows(one), rows(two), strict=True):
        sources = {name: row[f"loss/{name}"] for name in ("web", "code")}
        assert {name: other[f"loss/{name}"] for name in sources} == pytest.approx(sources, rel=1e-5)
        if packing == "cut":  # sequences have equally many labels; those of other names differ
            assert 0.75 * sources["web"] + 0.25 * sources["code"] == pytest.approx(row["loss"])
            assert 0.25 * sources["web"] + 0.75 * sources["code"] != pytest.approx(row["loss"])
    named = {name: last[f"validation_loss/{name}"] for name in ("web", "code", "other")}
    assert len(set(named.values())) == 3
    assert last["validation_loss"] == pytest.approx((named["web"] + named["code"]) / 2)
    for name, loss in named.items():
        assert rows(two)[-1][f"validation_loss/{name}"] == pytest.approx(loss, rel=1e-5)


def test_a_validation_set_beside_one_corpus(tmp_path: Path, corpora: dict) -> None:
    """Leaves `validation_loss` to the documents that are held out."""
    run, plain = tmp_path / "run", tmp_path / "plain"
    keys = {"data__paths": [str(corpora["web"])], "train__steps": 2}
    run_ranks(1, fit, tiny(run, **keys, data__validation=settings(corpora)["data__validation"]))
    run_ranks(1, fit, tiny(plain, **keys))
    assert rows(run)[-1]["validation_loss"] == rows(plain)[-1]["validation_loss"]
    assert "validation_loss/other" in rows(run)[-1]


def test_what_a_source_holds_may_not_change(tmp_path: Path, corpora: dict) -> None:
    """By name: a source may be added, left out and weighted anew, but not hold other documents."""
    run = tmp_path / "run"
    keys = settings(corpora, train__steps=1)
    run_ranks(1, fit, tiny(run, **keys))
    resume = {"checkpoint__resume": "latest", "train__steps": 2}
    added = [*keys["data__mixture"], {"name": "new", "paths": [str(corpora["other"])]}]
    for sources in (added, added[1:]):
        preflight(tiny(run, **{**keys, **resume, "data__mixture": sources}), PLACE)
    renamed = [{**keys["data__mixture"][0], "paths": [str(corpora["other"])]}, added[1]]
    with pytest.raises(ConfigError, match=r"data\.mixture: .* was trained with other data of web"):
        preflight(tiny(run, **{**keys, **resume, "data__mixture": renamed}), PLACE)
    run_ranks(1, fit, tiny(run, **{**keys, **resume, "data__mixture": added[1:]}))  # without web
    again = {**keys, **resume, "train__steps": 3}
    with pytest.raises(ConfigError, match=r"was trained with other data of web"):
        preflight(tiny(run, **{**again, "data__mixture": renamed}), PLACE)
    preflight(tiny(run, **again), PLACE)
    paths = {"data__paths": [str(corpora["web"])]}
    with pytest.raises(ConfigError, match=r"data\.paths = .* was trained with other data"):
        preflight(tiny(run, **paths, **resume), PLACE)
    run_ranks(1, fit, tiny(tmp_path / "plain", **paths, train__steps=1))
    with pytest.raises(ConfigError, match="was trained with other data, without a mixture"):
        preflight(tiny(tmp_path / "plain", **{**keys, **resume}), PLACE)


def test_commands_know_mixtures(
    tmp_path: Path, corpora: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    keys = settings(corpora)
    text = tiny(tmp_path / "run", **keys, data__cache_dir=str(tmp_path / "cache")).to_toml()
    config.write_text(text)
    assert main(["stats", "--config", str(config)]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name}:\n" in printed for name in ("web", "code", "other"))
    show = ["show", "--config", str(config), "--step", "2", "--dp-size", "2"]
    assert main(show) == 0
    printed = capsys.readouterr().out
    numbers = [int(line.split()[1].rstrip(":")) for line in printed.splitlines() if "row" in line]
    assert sorted(numbers) == list(range(8, 16))
    assert printed.count(" of web\n") == 6
    assert printed.count(" of code\n") == 2
    assert printed.count("code.jsonl, document") >= 2
    with pytest.raises(ConfigError, match="--out writes one corpus"):
        main(["prepare", "--config", str(config), "--out", str(tmp_path / "out")])


REFUSED = [
    ('data.mixture=[{name="a", paths=["x"]}, {name="a", paths=["y"]}]', "a is named twice"),
    ('data.mixture=[{name="a b", paths=["x"]}]', "data.mixture.0.name = 'a b': "),
    ('data.mixture=[{name="a"}]', "data.mixture.a.paths is required"),
    ('data.mixture=[{name="a", paths="x"}]', 'write paths = ["x"]'),
    ('data.mixture=[{name="a", paths=["x"], weight=-1}]', "data.mixture.a.weight = -1: a weight"),
    ('data.mixture=[{name="a", paths=["x"], weight="x"}]', "data.mixture.a.weight = 'x': "),
    ('data.mixture=[{name="a", paths=["x"], weight=0}]', "all weights after step 0 are 0"),
    ('data.mixture=[{name="a", paths=["x"], weight=[1, 2]}]', "give a number, or a list of 1"),
    ('data.mixture=[{name="a", paths=["x"], epochs=0}]', "data.mixture.a.epochs = 0: "),
    ('data.mixture=[{name="a", paths=["x"], share=1}]', "unknown key data.mixture.a.share"),
    ('data.mixture={name="a"}', "write [[data.mixture]]"),
    ('data.mixture=[{name="a", paths=["no.txt"]}]', "/no.txt: No such file"),
    ('data.validation=[{name="a", paths=["no.txt"]}]', "data.validation: a: /"),
    ("data.mixture_steps=[3]", "data.mixture_steps = (3,) has no effect without data.mixture"),
    (
        'data.mixture=[{name="a", paths=["x"]}] && data.mixture_steps=[3]',
        "data.mixture_steps = (3,) has no effect without data.mixture with a list as a weight",
    ),
    (
        'data.validation=[{name="a", paths=["x"]}] && train.eval_sequences=0',
        "has no effect without train.eval_sequences",
    ),
]


@pytest.mark.parametrize(("override", "message"), REFUSED)
def test_mixtures_that_are_refused(override: str, message: str) -> None:
    with pytest.raises((ConfigError, DataError)) as error:
        preflight(RunConfig.load("configs/quickstart.toml", override.split(" && ")), PLACE)
    assert message in str(error.value)


def test_paths_beside_a_mixture_are_refused() -> None:
    words = ['data.mixture=[{name="a", paths=["x"]}]', 'data.paths=["y"]']
    with pytest.raises(ConfigError, match=r"data\.paths and data\.mixture exclude each other"):
        preflight(RunConfig.load(None, words), PLACE)


def test_a_mixture_is_written_and_read(tmp_path: Path) -> None:
    sources = '[{name="a", paths=["x"], weight=[1, 0.5]}, {name="b", paths=["y"], epochs=2}]'
    config = RunConfig.load(None, [f"data.mixture={sources}", "data.mixture_steps=[10]"])
    assert config.data.mixture[0].weight == (1.0, 0.5)
    written = tmp_path / "config.toml"
    written.write_text(config.to_toml())
    assert RunConfig.load(written) == config


def test_keys_of_one_source_are_overridden(tmp_path: Path) -> None:
    config = tmp_path / "mixture.toml"
    sources = [
        '[[data.mixture]]\nname = "web"\npaths = ["x"]',
        'name = "code"\npaths = ["y"]\nepochs = 2',
    ]
    config.write_text("\n[[data.mixture]]\n".join(sources))
    words = [
        "data.mixture.web.weight=[0.7, 0.1]",
        "data.mixture.code.epochs=",
        "data.mixture_steps=[9]",
    ]
    web, code = RunConfig.load(config, words).data.mixture
    assert (web.weight, web.paths, code.weight, code.epochs) == ((0.7, 0.1), ("x",), 1.0, None)
    for word, message in {
        "data.mixture.wep.weight=1": "no table has the name wep; did you mean web?",
        "data.mixture.web=1": "write data.mixture.NAME.KEY=value, or",
        "data.mixture.web.wait=1": "unknown key data.mixture.web.wait",
    }.items():
        with pytest.raises(ConfigError) as error:
            RunConfig.load(config, [word])
        assert message in str(error.value)


def test_a_run_of_stages_and_epochs(
    tmp_path: Path, corpora: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    """That ends with the epochs of all sources: by rows of each step, and with its checkpoint."""
    run, keys = tmp_path / "run", settings(corpora, data__mixture_steps=[2], train__steps=4)
    code, web = keys["data__mixture"][1], keys["data__mixture"][0]
    code["weight"], web["weight"] = [0, 1], [1, 0]
    epoch = (
        open_all(tiny(run, **keys).data, seq_len=32, seed=0, global_batch=8)[0]
        .sources["code"]  # type: ignore[attr-defined]
        .epoch
    )
    code["epochs"] = 16 / epoch
    run_ranks(1, fit, tiny(run, **keys, metrics__log_interval=1))
    state = json.loads(read_metadata(run / "checkpoints/step-4").data["mixture"])  # type: ignore[arg-type]
    assert {name: read for name, (read, *_) in state.items()} == {"web": 16, "code": 16}
    with pytest.raises(DataError, match="had their epochs in step 5"):
        preflight(tiny(tmp_path / "longer", **{**keys, "train__steps": 5}), PLACE)
    assert dry_run(tiny(tmp_path / "planned", **keys), "h200") == 0
    assert "mixture: code 50.0%" in capsys.readouterr().out
    resume = {"checkpoint__resume": str(run / "checkpoints/step-4"), "train__steps": 5}
    more = [{**web, "weight": [1, 1]}, {**code, "weight": [0, 0]}]
    keys = {**keys, **resume, "data__mixture": more}
    assert dry_run(tiny(tmp_path / "planned", **keys), "h200") == 0
    assert "mixture: code 0.0% (then " in capsys.readouterr().out
    setup = preflight(tiny(tmp_path / "planned", **keys), PLACE)
    assert setup.data.train.state(0), "it has not moved: ranks may agree to begin anew"
