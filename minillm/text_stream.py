"""Decoding one token at a time, for text that appears while it is generated.

A token need not end where a character ends, so the text of a token is not always known when the token is. What is shown must
never have to be taken back, and in the end it must be what decoding all tokens at once gives.
"""

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minillm.tokenizer import Tokenizer


class TextStream:
    """Decodes ids one by one. The pieces, joined with the last one of `flush`, are `decode` of all ids."""

    def push(self, token: int) -> str:
        """The text that is certain now, perhaps none: never part of a character. Raises `UsageError` for a bad id."""
        raise NotImplementedError

    def flush(self) -> str:
        """The text that was held back. The stream then begins anew."""
        raise NotImplementedError


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: a printable byte is its own letter, the others take those from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_alphabet()


class ByteStream(TextStream):
    """For a byte-level vocabulary, where a token is a string of bytes: UTF-8 tells when a character is whole."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        text = self._tokenizer.token_text(token)
        try:
            return self._utf8.decode(bytes(BYTE_OF_LETTER[letter] for letter in text))
        except KeyError:  # a token that was added as plain text
            return self._utf8.decode(text.encode())

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class WindowStream(TextStream):
    """For any other vocabulary: decode the last few tokens, and give out what follows the text that was given out before.

    The window begins at a token whose text is settled, so that what decoders do at the start of a text (most drop a space
    there) is behind it. Tokens such as <0xE2> stand for one byte, and a run of them is settled when it has ended.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = ""  # the text of the window that was given out

    def push(self, token: int) -> str:
        text = self._tokenizer.token_text(token)
        if not text:
            return ""
        self._window.append(token)
        size = len(self._window)
        # A character has at most 4 bytes, so a longer window holds none that can be whole soon: look at it only when
        # its size has doubled, or the work for a run of n such tokens would grow as n^2.
        if text.startswith("<0x") or (size > 8 and size & (size - 1)):
            return ""
        text = self._tokenizer.decode(self._window)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        piece = text[len(self._shown) :]
        self._window, self._shown = [token], self._tokenizer.decode([token])
        return piece

    def flush(self) -> str:
        piece = self._tokenizer.decode(self._window)[len(self._shown) :]
        self._window, self._shown = [], ""
        return piece
