"""What the README says is true; ``test_docs.py`` looks at its links and commands."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def example_with(words):
    (code,) = [code for code in PYTHON if words in code]
    return code


def test_the_python_example(demo_folder):
    code = example_with("restore_or_prefill_prompt_state")
    assert (
        "logits = state.model.decode(state.cache, max_new_tokens=1)\n"
        "next_token = logits.argmax()\n"
    ) in code
    names = {}
    exec(code, names)
    tokenizer = names["bank"].model.tokenizer
    assert tokenizer.decode([names["next_token"].item()]) == " Paris"
    longer = [*names["token_ids"], names["next_token"].item(), 1]
    state = names["restore_or_prefill_prompt_state"](
        token_ids=longer, session_bank=names["bank"], stable_prefix_len=0
    )
    assert state.cached_tokens == len(names["token_ids"])


def test_its_figures_are_those_of_the_benchmarks():
    """Each number of its table of measurements stands in ``benchmarks/README.md``."""
    measured = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    table = README.partition("| | MTPLX |")[2].partition("\n\n")[0]
    cells = [cell for row in table.splitlines()[2:] for cell in row.split("|")[2:4]]
    assert len(cells) >= 8
    figures = [figure for cell in cells for figure in re.findall(r"\d[\d.]*\d|\d", cell)]
    assert not [figure for figure in figures if not re.search(rf"\b{figure}\b", measured)]
