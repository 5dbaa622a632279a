"""Where a `Tokenizer` comes from: a GGUF file, a folder with tokenizer.json, or plain bytes where there is no checkpoint.

The `tokenizers` library is set up as the checkpoint says, or not at all: rules of cutting text are not interchangeable. With
another model's the text still comes back whole, in tokens that the model never saw.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from minillm import chat_template
from minillm.checkpoint_config import read_json
from minillm.errors import MinillmError, UsageError, printable
from minillm.gguf_file import GGUFFile
from minillm.text_stream import BYTE_OF_LETTER
from minillm.tokenizer import Tokenizer
from minillm.tokenizer_check import check_tokenizer

CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4  # tokenizer.ggml.token_type

# How each `tokenizer.ggml.pre` cuts text before merging, as the original tokenizer.json of its model does.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _regex_split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_PRE_TOKENIZERS: dict[str, Callable[[], list[Any]]] = {
    "gpt-2": lambda: [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": lambda: _regex_split(_LLAMA3_SPLIT),
    "qwen2": lambda: _regex_split(_QWEN2_SPLIT),
}


def tokenizer_from_gguf(file: GGUFFile, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata. Raises `MinillmError` if it is missing, damaged or not supported."""
    metadata = file.metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    advice = "use the folder with its tokenizer.json instead"
    if kind != "gpt2":
        raise MinillmError(
            f"{file.path} has a vocabulary of type {str(kind)[:80]!r}; gpt2 (BPE) is supported: {advice}."
        )
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise MinillmError(f"{file.path} cuts text by the rule {str(pre)[:80]!r}; supported are {known}: {advice}.")
    names = metadata.get("tokenizer.ggml.tokens")
    merges = metadata.get("tokenizer.ggml.merges")
    if not _are_strings(names) or not _are_strings(merges) or len(set(names)) != len(names):
        raise MinillmError(f"{file.path} holds no vocabulary that can be used: fetch it again.")
    backend = _bpe(names, merges, pre, str(file.path))
    types = metadata.get("tokenizer.ggml.token_type")
    types = types if isinstance(types, list) else []
    for token_type, special in ((CONTROL_TOKEN, True), (USER_DEFINED_TOKEN, False)):
        tokens = [name for name, kind in zip(names, types, strict=False) if kind == token_type]
        backend.add_tokens([AddedToken(name, special=special, normalized=False) for name in tokens])

    def token_id(key: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(names) else None

    bos, eos = token_id("bos"), token_id("eos")
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        vocab_size=vocab_size,
        stop_tokens=[token for token in (eos, token_id("eot"), token_id("eom")) if token is not None],
        bos_token=None if bos is None else names[bos],
        eos_token=None if eos is None else names[eos],
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") is True,
        template=template if isinstance(template, str) else None,
    )


def _are_strings(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _bpe(names: list[str], merges: list[str], pre: str, source: str) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer: merges are pairs of tokens, in the order in which they are joined."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        vocabulary = {name: i for i, name in enumerate(names)}
        # Llama 3 takes a piece that is a token as it is, also where its merges do not lead to it.
        model = models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")  # type: ignore[arg-type]
    except Exception:  # the library raises bare Exception and TypeError
        raise MinillmError(f"{source} holds merges that do not fit its vocabulary: fetch it again.") from None
    backend = tokenizers.Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())
    backend.decoder = decoders.ByteLevel()
    return backend


def tokenizer_from_folder(folder: Path, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a folder in Hugging Face form. Raises `MinillmError` if it is missing or damaged.

    tokenizer.json must be there; the chat template and the stop tokens come from the files beside it.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MinillmError(f"{folder} has no tokenizer.json, which holds the vocabulary: fetch it too.")
    check_tokenizer(read_json(path), path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        # A tokenizer.json may ask for padding or truncation, for training in batches, and for any number of tokens.
        backend.no_padding()
        backend.no_truncation()
        backend.decode(backend.encode("a b").ids)  # some damage only shows in use
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics are not even that
        reason = printable(str(error))[:200]
        raise MinillmError(f"{path} cannot be read ({reason}): it is damaged, so fetch it again.") from None
    settings = _optional_json(folder / "tokenizer_config.json")
    stops: set[int] = set()
    for source in (_optional_json(folder / "generation_config.json"), _optional_json(folder / "config.json")):
        value = source.get("eos_token_id")
        stops.update(token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))
    bos_token, eos_token = _token_content(settings.get("bos_token")), _token_content(settings.get("eos_token"))
    if eos_token is not None and (eos := backend.token_to_id(eos_token)) is not None:
        stops.add(eos)
    add_bos = settings.get("add_bos_token")
    return Tokenizer(
        backend,
        vocab_size=vocab_size,
        stop_tokens=sorted(stops),
        bos_token=bos_token,
        eos_token=eos_token,
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        template=_folder_template(folder, settings),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_content(entry: object) -> str | None:
    """The text of a special token, which is written as a string or as a mapping with its properties."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(content, str) or any("\ud800" <= letter <= "\udfff" for letter in content):
        return None  # half of a surrogate pair is in no vocabulary
    return content


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        if not path.is_file() or path.stat().st_size > 4 * chat_template.MAX_TEMPLATE:  # a letter has at most 4 bytes
            raise MinillmError(f"{path} is not a chat template, or longer than any: fetch it again.")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MinillmError(f"Cannot read {path}: {error}.") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several templates, by name
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next(named, {}).get("template")
    return template if isinstance(template, str) else None


BYTE_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
BYTE_STOP_TOKEN = "<|end|>"


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer without a checkpoint: ids 0 to 255 are bytes, 256 ends an answer, and higher ones stand for no text.

    Raises `UsageError` for a vocabulary of fewer than 256 tokens.
    """
    if vocab_size < 256:
        raise UsageError(f"A vocabulary of {vocab_size} tokens cannot hold the 256 bytes.")
    backend = _bpe(sorted(BYTE_OF_LETTER, key=BYTE_OF_LETTER.__getitem__), [], "gpt-2", "bytes")
    stop_tokens = []
    if vocab_size > 256:
        backend.add_special_tokens([BYTE_STOP_TOKEN])
        stop_tokens.append(256)
    return Tokenizer(
        backend, vocab_size=vocab_size, stop_tokens=stop_tokens, eos_token=BYTE_STOP_TOKEN, template=BYTE_TEMPLATE
    )
