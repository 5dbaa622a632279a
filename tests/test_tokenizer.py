"""Text and ids: against transformers' reading of the same file, and piece by piece against the whole."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from helpers import is_one_sentence
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from minillm.download import default_model_path
from minillm.errors import MinillmError, UsageError
from minillm.gguf_file import GGUFFile
from minillm.text_stream import BYTE_OF_LETTER, ByteStream, WindowStream
from minillm.tokenizer import Tokenizer
from minillm.tokenizer_sources import byte_tokenizer, tokenizer_from_folder, tokenizer_from_gguf

TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "a\n\n\nb\t\tc \n d",
    "                indented",
    "It's we'll they'd I'm you've CAN'T",
    "0 12 345 6789 3.14159 1,000,000 2024-01-31",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2]}  # comment\n",
    "Ünïcödé straße naïve café",
    "日本語のテキスト、漢字とかな。",
    "Привет, мир! Как дела?",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "안녕하세요 세계",
    "สวัสดีชาวโลก",
    "👋🌍 👨‍👩‍👧‍👦 🏳️‍🌈 é (combining) \u200b zero width",
    "<|im_start|>user\nhi<|im_end|>",
    "https://example.com/a?b=c&d=%20#e",
    "∑ ∫ √2 ≈ 1.41 · α β γ → ∞",
    "",
    " ",
    "\x00\x01\x7f",
]


# --- The default model's tokenizer


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' own conversion of the tokenizer in the same GGUF file."""
    transformers = pytest.importorskip("transformers")
    path = default_model_path()
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def test_ids_equal_those_of_transformers(smollm2: Any, theirs: Any) -> None:
    _, tokenizer = smollm2
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs(text).input_ids, text


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_gives_the_ids_of_transformers_and_comes_back(smollm2: Any, theirs: Any, text: str) -> None:
    _, tokenizer = smollm2
    # transformers does not split at digits other than 0-9, which the model's own tokenizer.json does (see below).
    if not any(letter.isnumeric() and not letter.isascii() for letter in text):
        assert tokenizer.encode(text) == theirs(text).input_ids
    if has_every_byte(tokenizer, text):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def has_every_byte(tokenizer: Tokenizer, text: str) -> bool:
    """SmolLM2's vocabulary lacks 21 bytes that no common text has, and drops them; transformers does the same."""
    letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    return all(tokenizer.backend.token_to_id(letters[byte]) is not None for byte in text.encode())


def test_chat_equals_transformers_rendering(smollm2: Any, theirs: Any) -> None:
    _, tokenizer = smollm2
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi! 👋"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Why?\n"},
    ]
    for messages in (conversation, conversation[1:2]):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer.chat(messages) == expected
    assert tokenizer.chat("Hi! 👋") == tokenizer.chat(conversation[1:2])


def test_special_tokens_of_the_default_model(smollm2: Any) -> None:
    _, tokenizer = smollm2
    assert tokenizer.stop_tokens == {2}
    assert tokenizer.decode([1, 2, 0]) == ""
    assert tokenizer.encode("a<|im_end|>b") == [*tokenizer.encode("a"), 2, *tokenizer.encode("b")]
    assert tokenizer.encode("x")[0] != 1  # its add_bos_token is false


# --- Pre-tokenizers of GGUF files


def write_vocabulary(path: Path, pre: str | None, model: str = "gpt2", **extra: Any) -> GGUFFile:
    """A GGUF file with a small byte-level vocabulary, three digits of which merge, and no tensors."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "12", "123", "1234", "he", "hel", "<|bos|>", "<|eot|>", "<think>", "ab"]
    types = [1] * len(tokens)
    types[tokens.index("<|bos|>")] = types[tokens.index("<|eot|>")] = 3
    types[tokens.index("<think>")] = 4
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(extra.pop("tokens", tokens))
    writer.add_token_types(types)
    writer.add_token_merges(extra.pop("merges", ["1 2", "12 3", "123 4", "h e", "he l"]))
    writer.add_bos_token_id(tokens.index("<|bos|>"))
    writer.add_eot_token_id(tokens.index("<|eot|>"))
    for key, value in extra.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFFile(path)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.backend.id_to_token(token).replace("Ġ", " ") for token in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("gpt-2", ["1234"]),  # a run of digits is one piece
        ("llama-bpe", ["<|bos|>", "123", "4"]),  # runs of up to three
        ("qwen2", ["1", "2", "3", "4"]),  # one by one
        ("smollm", ["1", "2", "3", "4"]),
    ],
)
def test_each_rule_cuts_digits_its_own_way(pre: str, digits: list[str], tmp_path: Path) -> None:
    assert pieces(tokenizer_from_gguf(write_vocabulary(tmp_path / "v.gguf", pre)), "1234") == digits


def split(pre: str, text: str, folder: Path) -> list[str]:
    backend = tokenizer_from_gguf(write_vocabulary(folder / f"{pre}.gguf", pre)).backend
    normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(normal)]
    return [normal[start:end] for start, end in spans]


def test_rules_cut_text_as_their_models_do(tmp_path: Path) -> None:
    """The expected pieces follow from each model's published regular expression, read by hand."""
    text = "I'LL go\n\n  to x_1!!\n"
    assert split("gpt-2", text, tmp_path) == ["I", "'", "LL", " go", "\n\n ", " to", " x", "_", "1", "!!", "\n"]
    assert split("smollm", text, tmp_path) == ["I", "'", "LL", " go", "\n\n ", " to", " x", "_", "1", "!!", "\n"]
    llama = ["I", "'LL", " go", "\n\n", " ", " to", " x", "_", "1", "!!\n"]
    assert split("llama-bpe", text, tmp_path) == llama
    assert split("qwen2", text, tmp_path) == llama
    assert split("smollm", "a 12²", tmp_path) == ["a", " ", "1", "2", "²"]
    assert split("gpt-2", "a 12²", tmp_path) == ["a", " 12²"]
    assert split("qwen2", "e\u0301", tmp_path) == ["é"]  # Qwen composes letters and accents first


def test_llama3_takes_a_whole_piece_that_is_a_token(tmp_path: Path) -> None:
    """No merge leads to "ab". Llama 3's tokenizer looks the piece up before it merges (ignore_merges)."""
    assert pieces(tokenizer_from_gguf(write_vocabulary(tmp_path / "a.gguf", "llama-bpe")), "ab") == ["<|bos|>", "ab"]
    assert pieces(tokenizer_from_gguf(write_vocabulary(tmp_path / "b.gguf", "qwen2")), "ab") == ["a", "b"]


def test_added_tokens_and_bos_follow_the_file(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(write_vocabulary(tmp_path / "a.gguf", "qwen2", add_bos_token=True))
    assert pieces(tokenizer, "a<think>b<|eot|>") == ["<|bos|>", "a", "<think>", "b", "<|eot|>"]
    assert tokenizer.decode(tokenizer.encode("a<think>b<|eot|>")) == "a<think>b"  # only control tokens are left out
    assert pieces(tokenizer, "<|bos|>a") == ["<|bos|>", "a"]  # not twice
    assert tokenizer.stop_tokens == {tokenizer.backend.token_to_id("<|eot|>")}
    never = tokenizer_from_gguf(write_vocabulary(tmp_path / "b.gguf", "llama-bpe", add_bos_token=False))
    assert pieces(never, "a") == ["a"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "deepseek-llm"}, "deepseek-llm"),
        ({"pre": "default"}, "default"),
        ({"pre": None}, "None"),
        ({"model": "llama"}, "tokenizer.json"),
        ({"model": "t5"}, "t5"),
        ({"merges": ["1 2 3"]}, "merges"),
        ({"merges": ["12"]}, "merges"),
        ({"merges": ["1 zz"]}, "merges"),
        ({"tokens": ["a", "a"]}, "vocabulary"),
    ],
)
def test_vocabularies_that_cannot_be_read_rightly_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(MinillmError) as caught:
        tokenizer_from_gguf(write_vocabulary(tmp_path / "v.gguf", **{"pre": "gpt-2"} | changes))
    assert words in str(caught.value)
    assert is_one_sentence(str(caught.value))


# --- Folders


def sentencepiece_like() -> tokenizers.Tokenizer:
    """A vocabulary with byte fallback and the decoder of Llama 2, which drops a space at the start of the text."""
    words = ["▁", "▁▁", "▁a", "▁the", "cat", "é", "日", "�", "x"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("▁", "▁"), ("▁", "a")]
    vocabulary = {name: i for i, name in enumerate([*names, "a"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_folder_gives_template_stop_tokens_and_bos(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}a{{ eos_token }}{% endfor %}"
    folder = write_folder(
        tmp_path,
        sentencepiece_like(),
        config={"eos_token_id": 2},
        generation_config={"eos_token_id": [2, 0]},
        tokenizer_config={
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "chat_template": [{"name": "tool", "template": ""}, {"name": "default", "template": template}],
        },
    )
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.stop_tokens == {0, 2}
    assert tokenizer.encode("a a")[0] == 1
    assert tokenizer.encode("a a").count(1) == 1
    assert tokenizer.decode(tokenizer.encode("a a")) == "a a"
    assert tokenizer.chat("hi").count(1) == 1
    assert tokenizer.chat("hi")[-1] == 2
    (folder / "chat_template.jinja").write_text("{{ bos_token }}x")
    assert tokenizer_from_folder(folder).chat("hi")[-1] == tokenizer.backend.token_to_id("x")


@pytest.mark.parametrize(("add_bos", "first"), [(None, [1]), (True, [1]), (False, [])])
def test_add_bos_token_decides_over_the_backend(add_bos: bool | None, first: list[int], tmp_path: Path) -> None:
    settings_file = {"bos_token": "<s>"} | ({} if add_bos is None else {"add_bos_token": add_bos})
    tokenizer = tokenizer_from_folder(write_folder(tmp_path, sentencepiece_like(), tokenizer_config=settings_file))
    assert tokenizer.encode("")[:1] == first


def test_padding_and_truncation_in_the_file_are_not_for_us(tmp_path: Path) -> None:
    backend = sentencepiece_like()
    backend.enable_padding(length=64)
    backend.enable_truncation(4)
    tokenizer = tokenizer_from_folder(write_folder(tmp_path, backend))
    assert len(tokenizer.encode("a" * 20)) > 10
    assert len(tokenizer.encode("a")) < 5


def test_folder_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings_file = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    folder = write_folder(tmp_path, sentencepiece_like(), tokenizer_config=settings_file)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = tokenizer_from_folder(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text).input_ids
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == reference.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


# --- Streaming


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.flush()]


def assert_stream_equals_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Joined pieces are the whole text, and what has been shown is always its beginning."""
    whole = tokenizer.decode(ids)
    shown = ""
    for piece in streamed(tokenizer, ids):
        shown += piece
        assert whole.startswith(shown)
    assert shown == whole


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=30))
def test_stream_of_any_ids_equals_the_whole(smollm2: Any, ids: list[int]) -> None:
    assert_stream_equals_whole(smollm2[1], ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_stream_of_any_text_equals_the_whole(smollm2: Any, text: str) -> None:
    tokenizer = smollm2[1]
    assert_stream_equals_whole(tokenizer, tokenizer.encode(text))
    if has_every_byte(tokenizer, text):
        assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text  # no U+FFFD where half a character waited


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 299), max_size=30))
def test_stream_of_bytes_equals_the_whole(ids: list[int]) -> None:
    assert_stream_equals_whole(byte_tokenizer(300), ids)


SENTENCEPIECE = Tokenizer(sentencepiece_like(), vocab_size=300)
# Words and special tokens are as frequent as the 256 bytes, of which those of "é" and "日" come often.
LIKELY = [0, 1, 2, 0xC3 + 3, 0xA9 + 3, 0xE6 + 3, 0x97 + 3, 0xA5 + 3, *range(259, 269)]


@settings(max_examples=400, deadline=None)
@given(ids=st.lists(st.one_of(st.sampled_from(LIKELY), st.integers(0, 299)), max_size=30))
def test_stream_with_byte_fallback_equals_the_whole(ids: list[int]) -> None:
    assert_stream_equals_whole(SENTENCEPIECE, ids)


def wrapped_byte_level() -> Tokenizer:
    """Byte-level behind a sequence of decoders: the general stream must serve it."""
    backend = byte_tokenizer(300).backend
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return Tokenizer(backend, vocab_size=300)


WRAPPED = wrapped_byte_level()


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.one_of(st.sampled_from([0xE6, 0x97, 0xA5, 0x41]), st.integers(0, 299)), max_size=40))
def test_stream_through_other_decoders_equals_the_whole(ids: list[int]) -> None:
    assert isinstance(WRAPPED.stream(), WindowStream)
    assert_stream_equals_whole(WRAPPED, ids)


def test_no_half_character_is_shown_and_none_is_held_back() -> None:
    tokenizer = byte_tokenizer(257)
    assert isinstance(tokenizer.stream(), ByteStream)
    assert streamed(tokenizer, list("aé👋b".encode())) == ["a", "", "é", "", "", "", "👋", "b", ""]
    assert streamed(tokenizer, list("é".encode())[:1]) == ["", "\ufffd"]


def test_stream_keeps_spaces_between_words_and_drops_the_first() -> None:
    the, a = SENTENCEPIECE.backend.token_to_id("▁the"), SENTENCEPIECE.backend.token_to_id("▁a")
    assert streamed(SENTENCEPIECE, [1, the, a, 2, the]) == ["", "the", " a", "", " the", ""]


def test_flushed_stream_begins_anew() -> None:
    for tokenizer in (SENTENCEPIECE, byte_tokenizer(300)):
        stream = tokenizer.stream()
        for ids in ([0xE6 + 3, 0x97 + 3], [260, 261], [0xC3]):
            assert "".join(stream.push(token) for token in ids) + stream.flush() == tokenizer.decode(ids)


class CountingTokenizer(Tokenizer):
    """Counts how many ids the stream asks it to decode."""

    decoded = 0

    def decode(self, ids: Any) -> str:
        self.decoded += len(ids)
        return super().decode(ids)


@pytest.mark.parametrize("pattern", [[261], [0xFF + 3], [1], [259], [0xC3 + 3, 0xA9 + 3, 260], [266]])
def test_work_a_token_does_not_grow_with_the_text(pattern: list[int]) -> None:
    """n tokens are decoded in windows of at most 8 tokens, or of doubling size: at most a fixed number of times each."""
    for backend in (sentencepiece_like(), wrapped_byte_level().backend):
        tokenizer = CountingTokenizer(backend, vocab_size=300)
        ids = pattern * (2048 // len(pattern))
        streamed(tokenizer, ids)
        assert tokenizer.decoded < 8 * len(ids)


def test_ids_of_numpy_and_of_tensors_are_decoded() -> None:
    tokenizer = byte_tokenizer(300)
    ids = tokenizer.encode("as you like it")
    for form in (np.array(ids), torch.tensor(ids), tuple(ids)):
        assert tokenizer.decode(form) == "as you like it"  # type: ignore[arg-type]


# --- What is refused


def test_bad_ids_are_refused_in_one_sentence(smollm2: Any) -> None:
    for tokenizer in (smollm2[1], byte_tokenizer(300), SENTENCEPIECE):
        for token in (-1, tokenizer.vocab_size, 2**40, 1.0, "a", None):
            for use in (lambda: tokenizer.decode([token]), lambda: tokenizer.stream().push(token)):  # noqa: B023
                with pytest.raises(UsageError, match="Token id") as caught:
                    use()
                assert is_one_sentence(str(caught.value))


def test_bad_text_is_refused_in_one_sentence(smollm2: Any) -> None:
    for text in ("\ud800", None, 3, ["a", "b"]):
        with pytest.raises(UsageError, match="valid Unicode") as caught:
            smollm2[1].encode(text)
        assert is_one_sentence(str(caught.value))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ([{}], "must be a mapping"),
        (["x"], "must be a mapping"),
        ("\ud800", "not valid Unicode"),
        ([{"role": "user"}], "must be a mapping"),
        ([{"content": "x"}], "Unknown role 'None'"),
        ([{"role": "user", "content": 1}], "must be a mapping"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
        ([{"role": "wizard", "content": "x"}], "Unknown role 'wizard'"),
    ],
)
def test_bad_messages_are_refused_in_one_sentence(messages: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        byte_tokenizer(300).chat(messages)
    assert is_one_sentence(str(caught.value))


def test_checkpoint_without_template_says_so() -> None:
    with pytest.raises(MinillmError, match="no chat template"):
        SENTENCEPIECE.chat("hi")
    with pytest.raises(MinillmError, match="no chat template"):
        next(SENTENCEPIECE.chats(["hi"]))


def test_many_chats_are_each_what_it_is_alone(smollm2: Any) -> None:
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi! 👋"}]
    for tokenizer in (smollm2[1], byte_tokenizer(300)):
        many = ["Hi! 👋", conversation, "Why?\n", "", conversation[1:]]
        assert list(tokenizer.chats(many)) == [tokenizer.chat(one) for one in many]
        assert list(tokenizer.chats([])) == []


def test_one_bad_chat_among_many_is_refused_before_any_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.chat_template.render_all", lambda *_: pytest.fail("one was rendered"))
    with pytest.raises(UsageError, match="valid Unicode"):
        next(byte_tokenizer(300).chats(["good", "\ud800"]))


# --- The tokenizer of bytes


def test_byte_tokenizer_is_the_bytes() -> None:
    tokenizer = byte_tokenizer(320)
    assert tokenizer.encode("aé") == list("aé".encode())
    assert tokenizer.decode(range(256)) == bytes(range(256)).decode(errors="replace")
    assert tokenizer.stop_tokens == {256}
    assert tokenizer.vocab_size == 320
    assert tokenizer.decode([65, 256, 257, 319]) == "A"
    assert tokenizer.decode(tokenizer.chat("hi")) == "user: hi\nassistant: "
    assert byte_tokenizer(256).stop_tokens == frozenset()
    with pytest.raises(UsageError, match="256 bytes"):
        byte_tokenizer(255)


def test_token_types_of_the_wrong_kind_are_ignored(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "v.gguf", "gpt-2")
    file.metadata["tokenizer.ggml.token_type"] = "control"
    file.metadata["tokenizer.ggml.eot_token_id"] = 10**9
    assert tokenizer_from_gguf(file).stop_tokens == frozenset()
    file.metadata["tokenizer.ggml.token_type"] = [3]
    assert tokenizer_from_gguf(file).decode([0]) == ""
