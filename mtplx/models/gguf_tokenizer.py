"""Builds an ordinary tokenizer folder from the vocabulary inside a GGUF file.

Decides how the two kinds of vocabulary that llama files carry are read: ``gpt2``
(byte-level BPE, whose pre-tokenizer the file names) and ``llama`` (SentencePiece BPE,
whose merges follow from scores). Reading the file is ``gguf.py``. Pure; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

from mtplx.errors import ModelLoadError

_END_TOKENS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>"}
)
"""Control tokens that end an answer wherever they exist: files name only one of them."""


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``.

    Args:
        metadata: Of the GGUF file, arrays of numbers as lists.
        folder: Must exist.

    Returns:
        ``bos_token_id`` and ``eos_token_id`` (a list) for ``config.json``, as far as the
        file names them.

    Raises:
        ModelLoadError: The file has no vocabulary, or a kind that is not known here.
    """
    facts = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in metadata.items()
        if name.startswith("tokenizer.ggml.")
    }
    tokens: list[str] = facts.get("tokens", [])
    if not tokens:
        raise ModelLoadError("The GGUF file holds no tokenizer. Use the model's folder.")
    types: list[int] = facts.get("token_type") or [_TokenType.NORMAL] * len(tokens)
    kind = facts.get("model")
    if kind == "gpt2":
        tokenizer = _byte_level(tokens, facts)
        starts_with_bos = facts.get("add_bos_token", facts.get("pre") == "llama-bpe")
    elif kind == "llama":
        tokenizer = _sentencepiece(tokens, types, facts)
        starts_with_bos = facts.get("add_bos_token", True)
    else:
        raise ModelLoadError(
            f"The GGUF file's tokenizer is of kind {kind!r}; this reads gpt2 and llama. "
            "Use the model's folder instead."
        )
    _add_tokens(tokenizer, tokens, types)
    bos = facts.get("bos_token_id")
    if starts_with_bos and bos is not None:
        start = f"{tokens[bos]}:0"
        tokenizer.post_processor = TemplateProcessing(
            single=[start, "$A:0"],
            pair=[start, "$A:0", "$B:1"],
            special_tokens=[(tokens[bos], bos)],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(metadata, facts, tokens, folder)

    ends = [facts[name] for name in ("eos_token_id", "eot_token_id") if name in facts]
    ends += [
        index
        for index, token in enumerate(tokens)
        if types[index] == _TokenType.CONTROL and token in _END_TOKENS
    ]
    ids = {"bos_token_id": bos, "eos_token_id": list(dict.fromkeys(ends)) or None}
    return {name: value for name, value in ids.items() if value is not None}


def _byte_level(tokens: list[str], facts: Mapping[str, Any]) -> Tokenizer:
    name = facts.get("pre", "default")
    pre_tokenizer = _pre_tokenizer(name)
    merges = [tuple(merge.split(" ", 1)) for merge in facts.get("merges", [])]
    # Llama 3 takes a word that is in the vocabulary whole, merges or not.
    tokenizer = _bpe(tokens, merges, ignore_merges=name == "llama-bpe")
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bpe(tokens: list[str], merges: list[Any], **options: Any) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return Tokenizer(BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # The library raises no class of its own.
        raise ModelLoadError(f"The GGUF file's tokenizer is damaged: {error}.") from error


def _pre_tokenizer(name: str) -> PreTokenizer:
    """Return what cuts text into words, by the name that llama.cpp gave it."""
    if name == "gpt-2":
        return ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    contraction = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    word = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    cuts = {
        "llama-bpe": [rf"{contraction}|{word}|\p{{N}}{{1,3}}|{rest}"],
        "qwen2": [rf"{contraction}|{word}|\p{{N}}|{rest}"],
        # For files whose maker did not know: a compromise, applied one after the other.
        "default": [
            r"[\p{P}\$\+<=>\^~\|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            r"[0-9][0-9][0-9]",
        ],
    }
    if name not in cuts:
        known = ", ".join(sorted(["gpt-2", "smollm", *cuts]))
        raise ModelLoadError(
            f"The GGUF file's pre-tokenizer {name!r} is not known here; these are: "
            f"{known}. Use the model's folder instead."
        )
    splits = [Split(Regex(cut), behavior="isolated") for cut in cuts[name]]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(
    tokens: list[str], types: list[int], facts: Mapping[str, Any]
) -> Tokenizer:
    unknown = facts.get("unknown_token_id")
    tokenizer = _bpe(
        tokens,
        _merges_from_scores(tokens, types, facts.get("scores", [])),
        unk_token=tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    spaces = normalizers.Replace(" ", "▁")
    undo: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if facts.get("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        undo.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Return the merges that lead to each token, the best token's first.

    SentencePiece joins whichever neighbours make the token of the highest score; BPE joins
    by rank. Ranking every split of every token by its score makes them one.
    """
    if len(scores) != len(tokens):
        raise ModelLoadError(
            "The GGUF file's tokenizer has no scores. Use the model's folder."
        )
    usable = {
        token: index
        for index, token in enumerate(tokens)
        if types[index] in (_TokenType.NORMAL, _TokenType.USER_DEFINED)
    }
    ranked = []
    for token, index in usable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                ranked.append((-scores[index], index, usable[left], usable[right]))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(ranked)]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Have control and user-defined tokens found whole in any text."""
    special = {_TokenType.UNKNOWN, _TokenType.CONTROL}
    tokenizer.add_tokens(
        [
            AddedToken(token, special=types[index] in special, normalized=False)
            for index, token in enumerate(tokens)
            if types[index] in special or types[index] == _TokenType.USER_DEFINED
        ]
    )


def _write_config(
    metadata: Mapping[str, Any], facts: Mapping[str, Any], tokens: list[str], folder: Path
) -> None:
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config: dict[str, Any] = {
        # The generic class: it takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for key, name in named.items():
        index = facts.get(f"{name}_token_id")
        if index is not None:
            config[f"{key}_token"] = tokens[index]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
