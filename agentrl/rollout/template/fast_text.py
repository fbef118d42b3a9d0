"""Byte-level BPE, quicker: words are encoded once, ids decoded through a table.

Nearly all current models tokenize alike: a regular expression splits text into words, each word's bytes
are merged on their own. A rollout sees the same words again and again, so a dictionary from word to ids
does most of the work, in a fifth of the tokenizer's own time for a page of 200 tokens (decoding: in a
third). Text with control characters, on which regular
expression libraries differ, goes to the tokenizer itself. Encoder and decoder are compared with the
tokenizer when they are made, and are not used if they differ.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from regex import Pattern
    from tokenizers import Tokenizer

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FORMS = ("NFC", "NFKC", "NFD", "NFKD")  # all leave ASCII as it is
_KEPT = 1 << 18
_LONGEST_KEPT = 64  # characters of a run, and of a word


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in printable}
    others = [b for b in range(256) if b not in table]
    table |= {b: chr(256 + i) for i, b in enumerate(others)}
    return dict(sorted(table.items()))


class WordEncoder:
    """Ids of text without control tokens, by dictionaries of runs of text and of words. Make it with :meth:`of`."""

    def __init__(self, tokenizer: Tokenizer, pattern: Pattern[str], form: str | None) -> None:
        self._form = form
        words = _Words(tokenizer.model)
        self._runs, self._spaced = _Runs(words, pattern), _Runs(words, pattern, " ")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WordEncoder | None:
        """For ``tokenizer``; None when it works in another way."""
        pattern = _split_pattern(described(tokenizer.pre_tokenizer))
        form = described(tokenizer.normalizer).get("type")
        known = pattern is not None and (form is None or form in _FORMS)
        if not known or type(tokenizer.model).__name__ != "BPE" or tokenizer.model.dropout:
            return None
        import regex  # what transformers itself splits words with

        try:
            encoder = cls(tokenizer, regex.compile(str(pattern)), form)
        except (ValueError, regex.error):  # a pattern that only the tokenizer's library knows
            return None
        same = (encoder.encode(t) == packed(tokenizer.encode(t, add_special_tokens=False).ids) for t in _samples())
        return encoder if all(same) else None

    def encode(self, text: str) -> bytes | None:
        """Ids (int32) of ``text``, which contains no added token; None when the tokenizer itself must do it."""
        if self._form is not None and not text.isascii():
            text = unicodedata.normalize(self._form, text)  # type: ignore[arg-type]
        # Text is cut before each space that follows something else: no word of a split expression reaches over that.
        pieces, at = text.split(" "), 1
        while at < len(pieces) and (pieces[at - 1][-1:].isspace() or (at > 1 and not pieces[at - 1])):
            at += 1
        first, others = " ".join(pieces[:at]), pieces[at:]
        try:
            ids = [self._runs[first], *map(self._spaced.__getitem__, others[:-1])]
            if others:
                ids.append(self._runs[f" {others[-1]}"])
            return b"".join(ids)
        except KeyError:  # another space follows white space, or the tokenizer itself must cut a run
            runs, run = list[str](), [first]
        for piece in others:
            if run[-1][-1:].isspace() or (len(run) > 1 and not run[-1]):  # it ends with white space
                run.append(piece)
            else:
                runs.append(" ".join(run))
                run = ["", piece]
        runs.append(" ".join(run))
        try:
            return b"".join(map(self._runs.__getitem__, runs))
        except KeyError:
            return None


class _Runs(dict[str, bytes]):
    """Ids of each run of text; a long one is cut anew each time. KeyError: the tokenizer itself must cut it.

    Args:
        words: Ids of words.
        pattern: What a word is.
        space: What stands before each run. With one, a run that ends with white space is a KeyError: it goes on.
    """

    def __init__(self, words: _Words, pattern: Pattern[str], space: str = "") -> None:
        super().__init__()
        self._words, self._split, self._space = words, pattern, space

    def __missing__(self, run: str) -> bytes:
        if self._space and (not run or run[-1].isspace()):
            raise KeyError(run)
        text = self._space + run
        found = self._split.findall(text)
        if _CONTROL_CHARACTER.search(text) or len("".join(found)) != len(text):
            raise KeyError(run)  # what the expression passed over is not a word of its own
        ids = b"".join(map(self._words.__getitem__, found))
        if len(run) <= _LONGEST_KEPT:
            if len(self) >= _KEPT:
                self.clear()
            self[run] = ids
        return ids


class _Words(dict[str, bytes]):
    """Ids of each word; a long one is looked up anew each time."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model, self._letters = model, list(byte_alphabet().values())

    def __missing__(self, word: str) -> bytes:
        spelled = "".join([self._letters[b] for b in word.encode()])
        ids = packed([token.id for token in self._model.tokenize(spelled)])
        if len(word) <= _LONGEST_KEPT:
            if len(self) >= _KEPT:
                self.clear()
            self[word] = ids
        return ids


class ByteDecoder:
    """Text of ids through a table from id to bytes, filled as ids occur. Make it with :meth:`of`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text_of = tokenizer.id_to_token
        self._to_byte = {letter: byte for byte, letter in byte_alphabet().items()}
        self._bytes = np.full(tokenizer.get_vocab_size(with_added_tokens=True), None, object)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ByteDecoder | None:
        """For ``tokenizer``; None when its decoder is not the byte-level one."""
        if described(tokenizer.decoder).get("type") != "ByteLevel":
            return None
        decoder, rng = cls(tokenizer), np.random.default_rng(0)
        tries = [rng.integers(0, len(decoder._bytes), 200) for _ in range(20)] if len(decoder._bytes) else []
        same = [decoder.decode(t) == tokenizer.decode(t.tolist(), skip_special_tokens=False) for t in tries]
        return decoder if all(same) else None

    def decode(self, ids: np.ndarray) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD, ids beyond the vocabulary nothing."""
        try:
            said = b"".join(self._bytes[ids].tolist())
        except (TypeError, IndexError):  # an id that never occurred, or is in no vocabulary
            said = b"".join(map(self._learn, ids.tolist()))
        return said.decode("utf-8", "replace")

    def _learn(self, index: int) -> bytes:
        token, to_byte = self._text_of(index) or "", self._to_byte
        spelled = all(letter in to_byte for letter in token)
        value = bytes([to_byte[letter] for letter in token]) if spelled else token.encode()
        if index < len(self._bytes):
            self._bytes[index] = value
        return value


def described(part: Any) -> dict[str, Any]:
    """A component of a tokenizer as ``tokenizer.json`` describes it; empty without one."""
    return json.loads(part.__getstate__()) if part is not None else {}


def _split_pattern(pre: dict[str, Any]) -> str | None:
    """The regular expression that cuts text into words; None when more happens than that."""
    steps = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return _GPT2_SPLIT if steps[0].get("use_regex", True) else None
    first = steps[0]
    plain = first.get("type") == "Split" and first.get("behavior") == "Isolated" and not first.get("invert")
    if len(steps) > 2 or not plain or steps[1].get("use_regex", True):
        return None
    return (first.get("pattern") or {}).get("Regex")


def packed(ids: Sequence[int]) -> bytes:
    """Ids as int32."""
    return np.array(ids, np.int32).tobytes()


def _samples() -> list[str]:
    """Texts that try each branch of a split expression."""
    rng = random.Random(0)
    ascii_letters = "abcXYZ019  \n\t.,'\"-_(){}/\\:;!?#@"
    letters = ascii_letters + "éÅßñ–“”…\u00a0\u2009中文字かな한Ωжक्ا٣Ⅷ½\u0301😀"
    words = ["it's", "I'LL", "we've", " the", "The", "2024", "  ", "\n\n", " \n", "don't", "x=1;", "...", "\t", "café"]
    texts = ["".join(rng.choice(source) for _ in range(60)) for source in (ascii_letters, letters) for _ in range(40)]
    return [*texts, *("".join(rng.choice(words) for _ in range(30)) for _ in range(40)), ""]
