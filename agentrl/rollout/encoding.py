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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.errors import ConfigError
from agentrl.rollout.fast_text import ByteDecoder, WordEncoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ProvenanceTokenizer:
    """Encodes rendered text whose content was sealed.

    Args:
        reader: the model's own ``tokenizers.Tokenizer``. It is only read and decoded with.

    Raises:
        ConfigError: a private copy cannot be made from its JSON.
    """

    def __init__(self, reader: Tokenizer) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._reader = reader
        spec = json.loads(reader.to_str())
        self._decoder = ByteDecoder.of(reader, spec)
        spec.update(truncation=None, padding=None, post_processor=None)
        controls = [t for t in spec["added_tokens"] if t["content"].strip()]
        self.control_ids: dict[str, int] = {t["content"]: t["id"] for t in controls}
        nonce = secrets.token_hex(8)
        _hide_from_model(spec, self.control_ids, nonce)

        for token in controls:
            # Matched on raw text only: a normalizer must not turn other text into a control token.
            token["normalized"] = False
        template = _load(Tokenizer, spec)
        spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].strip()]
        content = _load(Tokenizer, spec)

        # A rare first character keeps the search for marks quick; ASCII survives any JSON escaping.
        self._anchor = f"~anchor{nonce}"
        self._placeholders = {text: f"~{nonce}x{i:04d}" for i, text in enumerate(self.control_ids)}
        private = [self._anchor, *self._placeholders.values()]
        tokens = [AddedToken(p, special=True, normalized=False) for p in private]
        template.add_special_tokens(tokens)
        content.add_special_tokens(tokens[:1])
        self._template = template
        longest_first = sorted(map(re.escape, self.control_ids), key=len, reverse=True)
        self._control_text = re.compile("|".join(longest_first)) if longest_first else None
        self._real_id, self._moved = self._id_map()
        self._sealed_ids = {template.token_to_id(self._anchor): np.empty(0, np.int32)}
        self._sealed_ids |= {
            template.token_to_id(p): self._ordinary_ids(content, text) for text, p in self._placeholders.items()
        }
        # Added tokens that swallow white space, or consist of it, need the tokenizer's own splitting.
        simple = not spec["added_tokens"] and not any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in controls)
        self._words = WordEncoder.of(template, spec) if simple else None
        self._mark_ids = {text: [index] for text, index in self.control_ids.items()}
        self._mark_ids |= {p: self._sealed_ids[template.token_to_id(p)].tolist() for p in private[1:]}
        self._marks = re.compile("(" + "|".join(map(re.escape, sorted(self._mark_ids, key=len, reverse=True))) + ")")

    def seal(self, text: str) -> str:
        """``text`` with each added token's text replaced by a placeholder; most texts come back as they are.

        Lone surrogates, which no tokenizer takes, become question marks.
        """
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")
        if self._control_text is None or not self._control_text.search(text):
            return text
        return self._control_text.sub(lambda match: self._placeholders[match.group()], text)

    def controls_in(self, text: str) -> list[str]:
        """The control tokens whose text stands in ``text``, in order."""
        return self._control_text.findall(text) if self._control_text is not None else []

    def seal_all(self, value: Any) -> Any:
        """Seal every string inside a JSON-like value (keys too)."""
        if isinstance(value, str):
            return self.seal(value)
        if isinstance(value, dict):
            return {self.seal(k) if isinstance(k, str) else k: self.seal_all(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.seal_all(v) for v in value]
        return value

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
        encode, ids = self._words.encode, []
        # Text and marks alternate. Added tokens cut text before anything else looks at it.
        for i, piece in enumerate(self._marks.split(rendered)):
            if i % 2:
                ids += self._mark_ids[piece]
            elif piece:
                known = encode(piece)
                ids += self._template.encode(piece, add_special_tokens=False).ids if known is None else known
        return np.array(ids, np.int32)

    def encode_content(self, text: str) -> np.ndarray:
        """int32 ``[n]``: ids of content in the middle of a sequence; never a control token."""
        return self.encode_after_control(self.seal(text))

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of ``ids``, control tokens included."""
        ids = np.asarray(ids).tolist()
        if self._decoder is not None:
            return self._decoder.decode(ids)
        return self._reader.decode(ids, skip_special_tokens=False)

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
            table[index] = self._reader.token_to_id(token.content)
            moved |= bool(table[index] != index)
        self._first_private = min(self._template.token_to_id(p) for p in private)
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


def _load(tokenizer_class: Any, spec: dict[str, Any]) -> Any:
    try:
        return tokenizer_class.from_str(json.dumps(spec))
    except Exception as error:  # the Rust library raises plain Exception
        raise ConfigError(
            f"the tokenizer's JSON cannot be loaded: {error}; expected a Hugging Face tokenizer.json"
        ) from error


def _hide_from_model(spec: dict[str, Any], controls: dict[str, int], nonce: str) -> None:
    """Rename control tokens inside the model's vocabulary, so that only an added token can give their ids."""
    model = spec["model"]
    vocab = model["vocab"]
    hidden = {text: f"hidden{nonce}x{index}" for text, index in controls.items()}
    if isinstance(vocab, dict):
        model["vocab"] = {hidden.get(text, text): index for text, index in vocab.items()}
        if model.get("unk_token") in hidden and model["unk_token"] in vocab:
            model["unk_token"] = hidden[model["unk_token"]]
    else:
        model["vocab"] = [[hidden.get(text, text), score] for text, score in vocab]
