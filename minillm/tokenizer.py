"""Text to token ids and back.

The splitting is done by the `tokenizers` library, which tokenizer_sources.py sets up as a checkpoint says. Here stands what a
language model needs around it: the chat template, the tokens that end an answer, and (in text_stream.py) decoding one token at
a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders

from minillm import chat_template
from minillm.config import check_token
from minillm.errors import MinillmError, UsageError, printable
from minillm.text_stream import ByteStream, TextStream, WindowStream


class Tokenizer:
    """Between text and token ids 0 ... vocab_size - 1. An id that the vocabulary does not name stands for no text.

    `stop_tokens` are the ids that end an answer. Special tokens, the marks around messages and such, are read in
    text that is encoded and left out of text that is decoded.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int | None = None,
        stop_tokens: Sequence[int] = (),
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos: bool | None = None,
        template: str | None = None,
    ) -> None:
        """`add_bos` None leaves it to the backend whether encoded text begins with the BOS token."""
        self.backend = backend
        self.vocab_size = vocab_size or backend.get_vocab_size()
        self.stop_tokens = frozenset(stop_tokens)
        self.template = template
        self._add_bos = add_bos
        self._bos_id = None if bos_token is None else backend.token_to_id(bos_token)
        named = {"bos_token": bos_token, "eos_token": eos_token}
        self._template_variables = {name: token for name, token in named.items() if token is not None}
        added = backend.get_added_tokens_decoder()
        self._silent = {token for token, entry in added.items() if entry.special}  # special tokens are not decoded

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, after a BOS token where the checkpoint asks for one. Raises `UsageError` for what is no text."""
        ids = self._encode(text, add_special_tokens=self._add_bos is not False)
        if self._add_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeError):  # UnicodeError: half of a surrogate pair
            raise UsageError("Only text that is valid Unicode can be encoded.") from None
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                reason = printable(str(error))[:200]
                raise MinillmError(f"The tokenizer of this checkpoint fails at this text ({reason}).") from None
            raise

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens; bytes that are no UTF-8 become U+FFFD. Raises `UsageError` for a bad id."""
        return str(
            self.backend.decode([check_token(token, self.vocab_size) for token in ids], skip_special_tokens=True)
        )

    def chat(self, messages: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a conversation, up to where the assistant is to go on; a string is one message of the user.

        Raises `UsageError` for bad messages, `MinillmError` for a checkpoint whose template is missing or fails.
        """
        return next(self.chats([messages]))

    def chats(self, conversations: Sequence[str | Sequence[Mapping[str, Any]]]) -> Iterator[list[int]]:
        """What `chat` gives for each of many conversations, in their order, one after the other as they are asked for.

        A template runs in a process of its own, and here many share one. Raises as `chat` does, for bad messages before any is
        rendered.
        """
        checked = [[{"role": "user", "content": c}] if isinstance(c, str) else c for c in conversations]
        for messages in checked:
            chat_template.check_messages(messages)
        if self.template is None:
            raise MinillmError(
                "This checkpoint has no chat template: encode the prompt as plain text, on the command line without --chat."
            )
        for text in chat_template.render_all(self.template, checked, self._template_variables):
            yield self._encode(text, add_special_tokens=False)  # the template itself writes the BOS token

    def stream(self) -> TextStream:
        """A new decoder that takes one id at a time."""
        byte_level = isinstance(self.backend.decoder, decoders.ByteLevel)
        return ByteStream(self) if byte_level else WindowStream(self)

    def token_text(self, token: int) -> str:
        """How the vocabulary writes a token; empty for one that decoding leaves out. Raises `UsageError` for a bad id."""
        token = check_token(token, self.vocab_size)
        return "" if token in self._silent else self.backend.id_to_token(token) or ""
