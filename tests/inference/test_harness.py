"""`dtron eval --tasks`: lm-evaluation-harness on dtron's model and on the exported folder."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dtron import cli
from tests.harness import run_ranks
from tests.training.test_trainer import fit, tiny

DOCUMENTS = [
    {"question": "In the beginning", "choices": [" xq", " created the heaven"], "answer": 1},
    {"question": "And God said, Let there be light: and there", "choices": [" zz", " was"]},
    {"question": "God", "choices": [" said", " qqj"]},
]
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: brier_score}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}, and a text that is longer than one window of 32 tokens"
metric_list: [{metric: bits_per_byte}]
""",
    "last_word": """
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "text": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: " "
generation_kwargs: {until: ["e", "q"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of task files on local documents."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = "".join(json.dumps({"answer": 0, **each}) + "\n" for each in DOCUMENTS)
    (folder / "documents.jsonl").write_text(rows, encoding="utf-8")
    for name, text in TASKS.items():
        data = f"{{data_files: {{test: {folder / 'documents.jsonl'}}}}}"
        head = f"task: local_{name}\ndataset_path: json\ndataset_kwargs: {data}\ntest_split: test"
        (folder / f"{name}.yaml").write_text(head + text, encoding="utf-8")
    return folder


def evaluated(words: list[str], file: Path) -> None:
    """On each rank: run `dtron eval`; rank 0 keeps what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.commands(words) == 0
    if dist.get_rank() == 0:
        file.write_text(out.getvalue(), encoding="utf-8")


def metrics(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Numbers of all tasks, without standard errors, which may be missing."""
    return {
        f"{task} {name}": value
        for task, row in results.items()
        for name, value in row.items()
        if isinstance(value, float) and "stderr" not in name
    }


def test_results_are_those_of_the_exported_folder(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    run, names = tmp_path / "run", [f"local_{name}" for name in TASKS]
    run_ranks(1, fit, tiny(run, optim__lr=1e-2, train__steps=20))
    command = ["eval", str(run), "--tasks", ",".join(names), "--include-path", str(tasks)]
    run_ranks(2, evaluated, [*command, "--json", "parallel.tp=2"], tmp_path / "results")
    assert cli.commands(["convert", "to-hf", str(run), str(tmp_path / "hf")]) == 0
    theirs = lm_eval.simple_evaluate(
        "hf",
        f"pretrained={tmp_path / 'hf'},max_length=32,dtype=float32,device=cpu",
        tasks=names,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks)),
        log_samples=False,
        bootstrap_iters=0,
    )
    wanted = metrics(theirs["results"])
    assert {name.split()[0] for name in wanted} == set(names)
    found = json.loads((tmp_path / "results").read_text(encoding="utf-8"))
    assert metrics(found) == pytest.approx(wanted, rel=1e-4)
    assert cli.commands([*command[:2], "--tasks", "no_such_task"]) == 1
    assert "lm-eval has no such task" in capsys.readouterr().err
