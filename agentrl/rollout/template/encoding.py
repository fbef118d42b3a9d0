"""Text to ids by provenance: a control token comes from the template or the engine, never from content.

A tokenizer matches its added tokens (``<|im_end|>``, ``</tool_response>``) wherever their text occurs, so a
retrieved document could forge the end of a turn. Here content is *sealed* before it is rendered:
each occurrence of an added token's text becomes a private placeholder. The placeholder is an
added token of a private copy of the tokenizer, so the rendered text is encoded in one call by the
model's own rules, and each placeholder's id is then replaced by the ordinary sub-word ids of the
text it stands for.

Added tokens made of white space alone (some vocabularies hold runs of spaces) are ordinary text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.errors import ConfigError
from agentrl.rollout.template.fast_text import ByteDecoder, WordEncoder, packed

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


_SHORT = 24  # characters
_KEPT_PIECES = 1024


class ProvenanceTokenizer:
    """Encodes rendered text whose content was sealed. The model's own tokenizer is only read and decoded with.
    Raises ConfigError: a private copy cannot be made of it."""

    def __init__(self, reader: Tokenizer) -> None:
        from tokenizers import AddedToken

        self._reader = reader
        self._decoder = ByteDecoder.of(reader)
        added = dict(sorted(reader.get_added_tokens_decoder().items()))
        blank = [t for t in added.values() if not t.content.strip()]
        controls = {t.content: (index, t) for index, t in added.items() if t.content.strip()}
        self.control_ids: dict[str, int] = {text: index for text, (index, _) in controls.items()}
        nonce = secrets.token_hex(8)
        model = _model_without(reader, self.control_ids, nonce)

        # A rare first character keeps the search for marks quick; ASCII survives any JSON escaping.
        self._anchor = self.boundary = f"~anchor{nonce}"
        self._placeholders = {text: f"~{nonce}x{i:04d}" for i, text in enumerate(self.control_ids)}
        private = [self._anchor, *self._placeholders.values()]
        tokens = [AddedToken(p, special=True, normalized=False) for p in private]
        # Matched on raw text only: a normalizer must not turn other text into a control token.
        raw = [AddedToken(**t.__getstate__() | {"normalized": t.normalized and t in blank}) for t in added.values()]
        template = _tokenizer(reader, model, [*raw, *tokens])
        content = _tokenizer(reader, model, [*blank, *tokens[:1]])
        self._template = template
        self._control_text = re.compile(f"({any_of(self.control_ids)})") if self.control_ids else None
        self._real_id, self._moved = self._id_map()
        self._sealed_ids = {template.token_to_id(self._anchor): np.empty(0, np.int32)}
        self._sealed_ids |= {
            template.token_to_id(p): self._ordinary_ids(content, text) for text, p in self._placeholders.items()
        }
        # Added tokens that swallow white space, or consist of it, need the tokenizer's own splitting.
        simple = not blank and not any(t.lstrip or t.rstrip or t.single_word for _, t in controls.values())
        self._words = WordEncoder.of(template) if simple else None
        self._mark_ids = {text: packed([index]) for text, index in self.control_ids.items()}
        self._mark_ids |= {p: self._sealed_ids[template.token_to_id(p)].tobytes() for p in private}
        self._marks = re.compile(f"({any_of(self._mark_ids)})")
        self._nonce = nonce
        self._short: dict[str, bytes] = {}  # ids of short pieces: nearly all are of the template

    def seal(self, text: str, keep: Container[str] = ()) -> str:
        """``text`` with each added token's text replaced by a placeholder; most texts come back as they are.

        Those in ``keep`` stay control tokens. Lone surrogates, which no tokenizer takes, become question marks.
        """
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")
        if self._control_text is None or not self._control_text.search(text):
            return text
        return self._control_text.sub(lambda m: m[0] if m[0] in keep else self._placeholders[m[0]], text)

    def controls_in(self, text: str) -> list[str]:
        """The control tokens whose text stands in ``text``, in order."""
        return self._control_text.findall(text) if self._control_text is not None else []

    def seal_all(self, value: Any, keep: Container[str] = ()) -> Any:
        """Seal every string inside a JSON-like value (keys too); a message that holds nothing to seal is given back."""
        if type(value) is dict and self._is_harmless(value):
            return value
        if isinstance(value, str):
            return self.seal(value, keep)
        if isinstance(value, dict):
            return {self.seal(k, keep) if isinstance(k, str) else k: self.seal_all(v, keep) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.seal_all(v, keep) for v in value]
        return value

    def _is_harmless(self, message: dict[Any, Any]) -> bool:
        """Whether a flat dict holds no control token; one search is quicker than one for each string."""
        try:
            text = "\n".join((*message, *message.values()))
            if not text.isascii():
                text.encode()
        except (TypeError, UnicodeEncodeError):  # it holds more than text, or half of a character
            return False
        return self._control_text is None or not self._control_text.search(text)

    def sampled_controls(self, ids: np.ndarray) -> frozenset[str]:
        """Control tokens in the text of sampled ``ids`` that stand there as such each time, none spelled in pieces."""
        written = Counter(self._control_text.findall(self.decode(ids))) if self._control_text else Counter()
        if not written:
            return frozenset()
        sampled = Counter(np.asarray(ids).tolist())
        return frozenset(text for text, count in written.items() if sampled[self.control_ids[text]] == count)

    def encode(self, rendered: str) -> np.ndarray:
        """int32 ``[n]``: ids of text rendered by the template from sealed content."""
        if self._words is not None:
            return self._encode_by_words(rendered)
        # Not the batch call: it hands one text to a thread pool, which costs more than it saves.
        ids = np.array(self._template.encode(rendered, add_special_tokens=False).ids, np.int32)
        if len(ids) and (self._moved or int(ids.max()) >= self._first_private):
            return self._replace_private(ids)
        return ids

    def encode_after_control(self, rendered: str) -> np.ndarray:
        """As :meth:`encode`, for text that follows a control token, not the start of a sequence.

        Some tokenizers treat the first word of a text in its own way; those that go by words do not.
        """
        return self.encode(rendered if self._words is not None else self._anchor + rendered)

    def _encode_by_words(self, rendered: str) -> np.ndarray:
        ids: list[bytes] = []
        # Placeholders are rare; control tokens alone, which mostly begin with one letter, are found much sooner.
        marks = self._control_text
        if marks is None or self._nonce in rendered:
            marks = self._marks
        # Text and marks alternate. Added tokens cut text before anything else looks at it.
        for i, piece in enumerate(marks.split(rendered)):
            if i % 2:
                ids.append(self._mark_ids[piece])
            elif piece:
                known = self._short.get(piece)
                ids.append(self._encode_piece(piece) if known is None else known)
        return np.frombuffer(b"".join(ids), np.int32)

    def _encode_piece(self, piece: str) -> bytes:
        ids = self._words.encode(piece) if self._words is not None else None
        if ids is None:
            ids = packed(self._template.encode(piece, add_special_tokens=False).ids)
        if len(piece) <= _SHORT and len(self._short) < _KEPT_PIECES:
            self._short[piece] = ids
        return ids

    def encode_content(self, text: str) -> np.ndarray:
        """int32 ``[n]``: ids of content in the middle of a sequence; never a control token."""
        return self.encode_after_control(self.seal(text))

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of ``ids``, control tokens included."""
        ids = np.asarray(ids, np.int32)
        if self._decoder is not None:
            return self._decoder.decode(ids)
        return self._reader.decode(ids.tolist(), skip_special_tokens=False)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._reader.get_vocab_size(with_added_tokens=True)

    def _id_map(self) -> tuple[np.ndarray, bool]:
        """Ids of the private copy to ids of the model, and whether any differs."""
        ours = self._template.get_added_tokens_decoder()
        table = np.arange(max([self._template.get_vocab_size(with_added_tokens=True) - 1, *ours]) + 1, dtype=np.int32)
        moved = False
        private = {self._anchor, *self._placeholders.values()}
        for index, token in ours.items():
            if token.content in private:
                continue
            model_id = self._reader.token_to_id(token.content)
            assert model_id is not None, token.content  # the copy has the model's tokens
            table[index] = model_id
            moved |= model_id != index
        ids = [self._template.token_to_id(p) for p in private]
        self._first_private = min(index for index in ids if index is not None)
        return table, moved

    def _replace_private(self, ids: np.ndarray) -> np.ndarray:
        real = self._real_id[ids]
        cuts = np.flatnonzero(ids >= self._first_private)
        if not len(cuts):
            return real
        parts, start = [], 0
        for cut in cuts:
            parts += [real[start:cut], self._sealed_ids[int(ids[cut])]]
            start = cut + 1
        return np.concatenate([*parts, real[start:]])

    def _ordinary_ids(self, content: Tokenizer, control: str) -> np.ndarray:
        """Ids of a control token's text as plain content."""
        ids = content.encode(self._anchor + control, add_special_tokens=False).ids[1:]
        whitespace = {i: self._reader.token_to_id(t.content) for i, t in content.get_added_tokens_decoder().items()}
        return np.array([whitespace.get(i, i) for i in ids], np.int32)


def any_of(texts: Iterable[str]) -> str:
    """Regular expression of any of ``texts``, the longest that fits; what they begin with alike is written once.

    Some tokenizers have hundreds of control tokens, and a plain list of them takes long to compile and to search.
    """
    following: dict[str, list[str]] = {}
    ends = False
    for text in texts:
        if text:
            following.setdefault(text[0], []).append(text[1:])
        ends = ends or not text
    branches = [re.escape(letter) + any_of(rest) for letter, rest in following.items()]
    if not branches:
        return ""
    if len(branches) == 1 and not ends:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if ends else ''}"


def _tokenizer(reader: Tokenizer, model: Any, added: Sequence[AddedToken]) -> Tokenizer:
    """A tokenizer that splits text as ``reader`` does, with other added tokens. The model is shared, not copied."""
    from tokenizers import Tokenizer

    made = Tokenizer(model)
    made.normalizer, made.pre_tokenizer = reader.normalizer, reader.pre_tokenizer
    made.add_tokens(list(added))
    return made


def _model_without(reader: Tokenizer, controls: dict[str, int], nonce: str) -> Any:
    """The tokenizer's model, such that only an added token can give a control token's id.

    Nearly always that is the model as it is. Else its JSON is taken apart, which takes seconds for a large vocabulary.
    """
    from tokenizers import models

    model = reader.model
    known = [text for text, index in controls.items() if model.id_to_token(index) == text]
    # What byte-pair merges do with the text alone they do with it inside a word too.
    if isinstance(model, models.BPE) and not any(
        model.ignore_merges or [t.id for t in model.tokenize(text)] == [controls[text]] for text in known
    ):
        return model
    return _hidden(reader, {text: f"hidden{nonce}x{controls[text]}" for text in known})


def _hidden(reader: Tokenizer, names: dict[str, str]) -> Any:
    """A copy of the model in which tokens have other names, and no merge makes them."""
    from tokenizers import Tokenizer

    spec = json.loads(reader.to_str())
    model = spec["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): index for text, index in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    try:
        return Tokenizer.from_str(json.dumps({**spec, "added_tokens": [], "post_processor": None})).model
    except Exception as error:  # the Rust library raises plain Exception
        raise ConfigError(
            f"the tokenizer's model cannot be loaded without its control tokens ({', '.join(names)}): {error}; "
            "expected a Hugging Face tokenizer.json"
        ) from error
