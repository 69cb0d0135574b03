import json

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from mtplx.errors import ModelLoadError
from mtplx.models.gguf_tokenizer import write_tokenizer

BYTES = sorted(ByteLevel.alphabet())
TEXTS = ["Hello world", "  two  spaces\n\n\ttab", "Zoë 你好 🎉", "12345 it's 3.14", ""]


def byte_level(pre="gpt-2", *, words=(), merges=(), **facts):
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", *BYTES, *words]
    types = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    return ggml(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=types,
        merges=list(merges),
        eos_token_id=2,
        **facts,
    )


def sentencepiece(**facts):
    """Score order makes ``abc`` of ``ab`` + ``c``; ``bc`` is worth less."""
    scored = {
        "▁": -9.0,
        "a": -9.0,
        "b": -9.0,
        "c": -9.0,
        "bc": -3.0,
        "ab": -2.0,
        "abc": -1.0,
    }
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *scored]
    return ggml(
        model="llama",
        tokens=tokens,
        token_type=[2, 3, 3] + [6] * 256 + [1] * len(scored),
        scores=[0.0] * 259 + list(scored.values()),
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        **facts,
    )


def ggml(**facts):
    return {f"tokenizer.ggml.{name}": value for name, value in facts.items()}


def built(metadata, folder):
    ids = write_tokenizer(metadata, folder)
    return AutoTokenizer.from_pretrained(folder), ids


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"])
def test_byte_level_text_comes_back(tmp_path, pre, text):
    tokenizer, _ = built(byte_level(pre), tmp_path)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert all(index > 3 for index in ids)


def test_sentencepiece_text_comes_back_through_bytes(tmp_path):
    tokenizer, _ = built(sentencepiece(), tmp_path)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_pre_tokenizers_decide_how_digits_may_join(tmp_path):
    joined = {}
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "default"):
        metadata = byte_level(
            pre,
            words=["12", "34", "1234", "123"],
            merges=["1 2", "3 4", "12 34", "12 3"],
        )
        (tmp_path / pre).mkdir()
        tokenizer, _ = built(metadata, tmp_path / pre)
        joined[pre] = pieces(tokenizer, "1234")
    assert joined == {
        "gpt-2": ["1234"],
        "smollm": ["1", "2", "3", "4"],
        "llama-bpe": ["123", "4"],
        "qwen2": ["1", "2", "3", "4"],
        "default": ["123", "4"],
    }


def test_special_tokens_are_single_ids_and_hidden_on_demand(tmp_path):
    tokenizer, _ = built(byte_level(), tmp_path)
    ids = tokenizer.encode("<|im_start|>a<tool><|im_end|>", add_special_tokens=False)
    assert [ids[0], *ids[2:]] == [1, 3, 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>"


def test_sentencepiece_joins_by_score(tmp_path):
    tokenizer, _ = built(sentencepiece(), tmp_path)
    assert pieces(tokenizer, "abc") == ["▁", "abc"]
    assert pieces(tokenizer, "bc") == ["▁", "bc"]
    assert pieces(tokenizer, "babc") == ["▁", "b", "abc"]


def test_a_space_is_put_in_front_only_where_the_file_says_so(tmp_path):
    tokenizer, _ = built(sentencepiece(add_space_prefix=False), tmp_path)
    assert pieces(tokenizer, "abc") == ["abc"]
    assert tokenizer.decode(tokenizer.encode(" abc", add_special_tokens=False)) == " abc"


@pytest.mark.parametrize(
    ("metadata", "starts_with_bos"),
    [
        (sentencepiece(), True),
        (sentencepiece(add_bos_token=False), False),
        (byte_level(bos_token_id=1), False),
        (byte_level("llama-bpe", bos_token_id=1), True),
        (byte_level(bos_token_id=1, add_bos_token=True), True),
        (byte_level(add_bos_token=True), False),
    ],
)
def test_bos_comes_first_where_the_file_or_its_kind_says_so(
    tmp_path, metadata, starts_with_bos
):
    tokenizer, _ = built(metadata, tmp_path)
    with_bos = tokenizer.encode("abc")
    without = tokenizer.encode("abc", add_special_tokens=False)
    assert with_bos == ([1, *without] if starts_with_bos else without)


def test_every_token_that_ends_an_answer_is_reported(tmp_path):
    _, ids = built(byte_level(bos_token_id=1), tmp_path)
    assert ids == {"bos_token_id": 1, "eos_token_id": [2, 0]}


def test_the_chat_template_is_kept(tmp_path):
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
    tokenizer, _ = built(byte_level() | {"tokenizer.chat_template": template}, tmp_path)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False
    )
    assert rendered == "<|im_start|>a"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({}, "no tokenizer"),
        (ggml(model="bert", tokens=["a"]), "'bert'"),
        (byte_level("tekken"), "'tekken'"),
        (ggml(model="llama", tokens=["a"]), "no scores"),
        (byte_level(merges=["no such"]), "damaged"),
    ],
)
def test_an_unknown_vocabulary_is_refused_by_name(tmp_path, metadata, named):
    with pytest.raises(ModelLoadError, match=named):
        write_tokenizer(metadata, tmp_path)
