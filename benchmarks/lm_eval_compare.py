"""Give one task to lm-eval twice: by the API, and by mlx-lm's own evaluation.

    python benchmarks/lm_eval_compare.py http://127.0.0.1:8000 --model-folder FOLDER

lm-eval's ``local-completions`` asks the server (token ids, ``echo`` and ``logprobs``);
``mlx_lm.evaluate``'s ``MLXLM`` computes the same itself, from a folder with the weights
that the server serves, its tokenizer among them. The task, ``lm_eval_questions.jsonl``,
has questions with four answers each; it is given as plain text and by the chat template.
Prints both results as mlx-lm prints them, and how far the log-likelihoods of the answers
are apart. Exit code 1 if the results differ.

Needs lm-eval besides the project (``pip install 'lm-eval[api]'``; no torch) and nothing
from the internet.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

# Before they are imported: no data set or tokenizer is looked for on the internet.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Before MLX: it decides which BLAS MLX binds to, for mlx-lm's side as well.
import mtplx.backend  # noqa: F401

# isort: split
import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI
from mlx_lm.evaluate import MLXLM

QUESTIONS = Path(__file__).with_name("lm_eval_questions.jsonl")
TASK: dict[str, Any] = {
    "task": "questions",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(QUESTIONS)}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_norm")
    ],
}
SEED = 123

Likelihoods = list[tuple[float, bool]]


def evaluate(model: Any, chat_template: bool) -> tuple[dict[str, Any], Likelihoods]:
    """The results as mlx-lm prints them, and of each answer to each question how likely
    it is and whether greedy decoding gives it."""
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[TASK],
        apply_chat_template=chat_template,
        random_seed=SEED,
        numpy_random_seed=SEED,
        torch_random_seed=None,
        fewshot_random_seed=SEED,
    )
    samples = sorted(found["samples"]["questions"], key=lambda sample: sample["doc_id"])
    answers = [answer for sample in samples for answer in sample["filtered_resps"]]
    return found["results"]["questions"], answers


def served_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        return json.load(response)["data"][0]["id"]


def compare(served: Any, own: Any, chat_template: bool) -> bool:
    """Print both sides; tell whether they agree."""
    results, answers = evaluate(served, chat_template)
    own_results, own_answers = evaluate(own, chat_template)
    pairs = list(zip(answers, own_answers, strict=True))
    apart = max(abs(ours[0] - theirs[0]) for ours, theirs in pairs)
    greedy = sum(bool(ours[1]) != bool(theirs[1]) for ours, theirs in pairs)
    print(f"-- {'chat template' if chat_template else 'plain text'}")
    print("local-completions:", json.dumps(results))
    print("mlx_lm.evaluate:  ", json.dumps(own_results))
    print(
        f"{len(pairs)} answers: log-likelihoods at most {apart:.1e} apart, "
        f"greedy or not differs for {greedy}"
    )
    return results == own_results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("url")
    parser.add_argument("--model-folder", required=True, help="the weights served there")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1, help="prompts in a request")
    parser.add_argument("--timeout-s", type=int, default=300)
    options = parser.parse_args()
    served = LocalCompletionsAPI(
        model=served_model(options.url),
        base_url=f"{options.url}/v1/completions",
        tokenizer=options.model_folder,
        tokenizer_backend="huggingface",
        num_concurrent=options.concurrency,
        batch_size=options.batch_size,
        timeout=options.timeout_s,
    )
    agree = True
    for chat_template in (False, True):
        own = MLXLM(options.model_folder, use_chat_template=chat_template)
        agree &= compare(served, own, chat_template)
    print("the same" if agree else "NOT THE SAME")
    sys.exit(not agree)


if __name__ == "__main__":
    main()
