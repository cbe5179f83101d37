"""lm-eval, local-completions and local-chat-completions"""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from clients import checks
from clients.checks import MODEL, Server, raises, works
from lm_eval.tasks import TaskManager

TOLERANCE = 1e-3  # of a sum of log-probabilities; float32 on both sides
TASKS = TaskManager(include_defaults=False)  # reading those of the package takes half a minute
CHOICES = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": 0}
TEXTS = {
    "output_type": "generate_until",
    "doc_to_target": "answer",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 40},
    "metric_list": [{"metric": "exact_match"}],
}


def evaluate(
    server: Server,
    model: str,
    documents: list[dict[str, Any]],
    task: dict[str, Any],
    **options: Any,
) -> Any:
    """Results of a task made of these documents, as `lm_eval run` would report them."""
    os.environ["OPENAI_API_KEY"] = server.key
    endpoint = "chat/completions" if "chat" in model else "completions"
    arguments = {
        "model": MODEL,
        "base_url": f"{server.url}/{endpoint}",
        "tokenizer": str(server.folder),
        "num_concurrent": 4,
        "max_retries": 1,
        "max_length": 4096,
    }
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "test.json"
        data.write_text("\n".join(map(json.dumps, documents)))
        config = {
            "task": "tiny",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "prompt",
            "target_delimiter": "",
        }
        return lm_eval.simple_evaluate(
            model=model,
            model_args=arguments | options.pop("model_args", {}),
            tasks=[config | task],
            task_manager=TASKS,
            bootstrap_iters=0,
            **options,
        )


@works("scoring")
def scoring(server: Server) -> None:
    """Log-likelihoods are those of transformers."""
    expected = json.loads((server.folder / checks.LOGLIKELIHOODS).read_text())
    documents = [{"prompt": p, "choices": choices} for p, choices in checks.SCORED.items()]
    for batch in (1, 3):
        options = {"model_args": {"batch_size": batch}}
        samples = evaluate(server, "local-completions", documents, CHOICES, **options)["samples"]
        for sample in samples["tiny"]:
            found = [response[0][0] for response in sample["resps"]]
            for ours, theirs in zip(found, expected[sample["doc"]["prompt"]], strict=True):
                assert math.isclose(ours, theirs, abs_tol=TOLERANCE)
        assert len(samples["tiny"]) == len(checks.SCORED)


@works("chat")
def chat(server: Server) -> None:
    documents = [{"prompt": checks.JSON_ASKED, "answer": checks.JSON_SAID}] * 5
    options = {"apply_chat_template": True}
    results = evaluate(server, "local-chat-completions", documents, TEXTS, **options)
    assert results["results"]["tiny"]["exact_match,none"] == 1


@works("text")
def text(server: Server) -> None:
    documents = [{"prompt": "Oslo?<|report|>", "answer": checks.REPORT}] * 5
    results = evaluate(server, "local-completions", documents, TEXTS)
    assert results["results"]["tiny"]["exact_match,none"] == 1


@works("errors")
def errors(server: Server) -> None:
    documents = [{"prompt": "Oslo?", "answer": ""}]
    with raises(Exception, "404"):
        evaluate(server, "local-completions", documents, TEXTS, model_args={"model": "nonesuch"})
