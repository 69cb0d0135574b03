"""One tokenizer object serves the server's workers and the engine thread."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mtplx.errors import InvalidRequestError
from mtplx.text.tokenizer import Tokenizer

from .tokenizers_factory import CHATML, byte_level_json, make_tokenizer, make_wrapper, user

# isort: split
from mlx_lm.tokenizer_utils import TokenizerWrapper

KINDS = pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "char"])


class LineTokenizer(PreTrainedTokenizerFast):
    """A fast tokenizer that rewrites the text before the backend sees it."""

    def encode(self, text, **kwargs):
        return super().encode(text.replace("\n", "<n>"), **kwargs)

    def decode(self, *args, **kwargs):
        return super().decode(*args, **kwargs).replace("<n>", "\n")


@KINDS
def test_it_says_what_the_wrapped_tokenizer_says(kind):
    wrapper = make_wrapper(kind)
    tokenizer = make_tokenizer(kind)
    text = "The capital of France\nis Paris."
    for special in (False, True):
        token_ids = tokenizer.encode(text, add_special_tokens=special)
        assert token_ids == wrapper.encode(text, add_special_tokens=special)
        assert tokenizer.decode(token_ids) == wrapper.decode(
            token_ids, skip_special_tokens=True
        )
    assert tokenizer.eos_token_ids == {wrapper.eos_token_id}
    assert tokenizer.vocab_size == len(wrapper) > max(wrapper.get_vocab().values())


def test_a_tokenizer_that_rewrites_its_text_is_asked_itself():
    inner = LineTokenizer(tokenizer_object=Backend.from_str(byte_level_json()))
    inner.chat_template = CHATML
    tokenizer = Tokenizer(TokenizerWrapper(inner))
    token_ids = tokenizer.encode("a\nb", add_special_tokens=False)
    assert token_ids == inner.encode("a\nb", add_special_tokens=False)
    assert tokenizer.decode(token_ids) == "a\nb"
    assert tokenizer.render_chat([user("a")]).edges


def test_a_truncation_saved_with_the_tokenizer_does_not_cut_prompts():
    backend = Backend.from_str(byte_level_json())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    inner = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer = Tokenizer(TokenizerWrapper(inner))
    text = "What is the capital of France?"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids) == text


@KINDS
def test_plain_text_gets_the_special_tokens_of_a_text(kind):
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.render_text("the")
    assert list(prompt.token_ids) == tokenizer.encode("the", add_special_tokens=True)
    assert prompt.edges == ()
    assert prompt.stable_prefix_len == len(prompt.token_ids)


def test_a_begin_token_is_not_added_to_a_chat():
    tokenizer = make_tokenizer()
    (begin, *_) = tokenizer.render_text("a").token_ids
    assert begin not in tokenizer.render_chat([user("a")]).token_ids


def test_an_empty_text_is_refused():
    with pytest.raises(InvalidRequestError, match="no tokens") as caught:
        make_tokenizer("char").render_text("")
    assert caught.value.param == "prompt"


@KINDS
def test_half_a_surrogate_pair_is_refused(kind):
    with pytest.raises(InvalidRequestError, match="surrogate"):
        make_tokenizer(kind).render_text("a\ud800")
    with pytest.raises(InvalidRequestError, match="surrogate"):
        make_tokenizer(kind).render_chat([user("a\ud800")])


def test_without_a_chat_template_the_user_is_told_where_to_go():
    tokenizer = make_tokenizer(template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="/v1/completions") as caught:
        tokenizer.render_chat([user("a")])
    assert caught.value.param == "messages"


@KINDS
def test_threads_render_while_another_decodes(kind):
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.render_chat([user("the " * 50)])
    text = "the capital of France is Paris. " * 20
    token_ids = tokenizer.encode(text, add_special_tokens=False)

    def stream(_: int) -> str:
        answer = tokenizer.text_stream(())
        return "".join(answer.push(token_id) for token_id in token_ids) + answer.finish()

    with ThreadPoolExecutor(4) as pool:
        streams = pool.map(stream, range(4))
        chats = pool.map(lambda _: tokenizer.render_chat([user("the " * 50)]), range(20))
        texts = pool.map(lambda _: tokenizer.render_text(text), range(20))
        assert set(streams) == {text}
        assert set(chats) == {prompt}
        assert {len(p.token_ids) for p in texts} == {
            len(tokenizer.encode(text, add_special_tokens=True))
        }


@KINDS
def test_the_bytes_of_tokens_add_up_to_their_text(kind):
    tokenizer = make_tokenizer(kind)
    text = "The capital\n of Köln: 日本 é🙂" if kind != "char" else "The capital\n of Köln"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    data = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids)
    # SentencePiece writes a space before every text.
    assert data.decode() == (" " + text if kind == "byte_fallback" else text)
    texts = [tokenizer.token_text(token_id) for token_id in token_ids]
    assert ("\ufffd" in "".join(texts)) == (kind != "char")


@KINDS
def test_special_tokens_are_written_out_and_unknown_ones_are_nothing(kind):
    tokenizer = make_tokenizer(kind)
    (end,) = tokenizer.eos_token_ids
    assert tokenizer.token_text(end) == "<|im_end|>"
    assert tokenizer.token_bytes(end) == b"<|im_end|>"
    assert tokenizer.decode([end]) == ""
    assert tokenizer.decode([end], skip_special_tokens=False) == "<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_text(tokenizer.vocab_size) == ""
    assert tokenizer.token_bytes(-1) == b""


def test_the_layer_imports_no_mlx():
    code = (
        "import mtplx.text.tokenizer, sys; "
        "sys.exit(any(n.split('.')[0] in ('mlx', 'mlx_lm') for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
