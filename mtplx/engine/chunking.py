"""Whether a model can be read in spans, found out by trying.

Some networks look at the whole prompt at once, or get a cache wrong in the middle of a
window. What they compute in two parts then differs from what they compute in one, and
neither spans nor reuse are exact. Runs on the engine thread, once for each model.
"""

from __future__ import annotations

from mtplx.models import Model
from mtplx.models.trial import is_same, relative_error

_TRIAL = (3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26)


def chunking_problem(model: Model) -> str | None:
    """Return why ``model`` cannot be read in spans; None if it can."""
    tokens = [token % model.vocab_size for token in _TRIAL]
    try:
        whole, parts = model.new_cache(), model.new_cache()
        model.decode(whole, 0, token_ids=tokens)
        model.prefill(parts, tokens[:5])
        model.prefill(parts, tokens[5:6])
        model.decode(parts, 0, token_ids=tokens[6:])
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    assert whole.logits is not None
    assert parts.logits is not None
    error = relative_error(parts.logits, whole.logits)
    if is_same(error, model.dtype):
        return None
    return f"in two parts its logits are off by {error:.2g} of the largest"
