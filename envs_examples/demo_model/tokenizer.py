"""The demo model's tokenizer: byte-level BPE of 1,536 tokens in which every word of the world is one token.

Any text round-trips, because the 256 bytes are tokens. Words of the world and of the demo's scaffolding are
entries of their own, found before merges are tried (``ignore_merges``); merges are trained on a small
fixed text, for everything else. Building it takes no random choice, so the files are the same each time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.envs.builtin.search import names, world

VOCAB_SIZE = 1536
"""Tokens and rows of the embedding, a multiple of 128 so that any tensor-parallel size divides it."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens; dropped by ``decode(skip_special_tokens=True)``."""

MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that stay in decoded text, as in Qwen3."""

SPLIT_PATTERN = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+(?: +[^\s\p{L}\p{N}]+)*|\s+(?!\S)|\s+"
"""Words, digits, runs of punctuation, white space. Runs of punctuation may hold spaces, so that the
structure of JSON (``": {"``) costs one token."""

_COMMON_WORDS = """\
a about after all also an and any are as ask at be been before but by call can city company could do
document does each end fact find first for founder from get give given had has have he help her his how i if in
information into is it its just know last like line look made make may me more most must my name need new no not now of
often old on one only or other our out people person place question reply result results say see she short should so \
some
step such than that the their them then there these they thing think this time to tool tools two until up use user
was we were what when where which who why will with word would write year yes you your"""

_MERGE_TEXT = """
The quick brown fox jumps over the lazy dog while seven wizards quietly fix broken engines in the northern harbour.
An error occurred: the tool was given invalid arguments, expected a string, number or object; unknown tool, please try
again with another query. Nothing was found. The output was truncated. Reasoning about history, science and government
requires searching, reading, comparing and answering. additionalProperties integer boolean array items enum default
properties required description parameters function arguments string object title null true false
station international national university president population language capital country river mountain century
winter summer morning evening question answering consider therefore because between through against without another
"""


def _texts() -> list[str]:
    """Texts whose every piece becomes a token: what prompts, passages, calls and answers are made of."""
    from agentrl.envs.builtin.search import env

    relations = world.RELATIONS.values()
    facts = {name: "" for name in world.RELATIONS}
    return [
        env.SYSTEM_PROMPT,
        json.dumps(env.search_tool_schema()),
        *(r.question.format("X") for r in relations),
        *(r.phrase.format("X") for r in relations),
        *(passage.format(name="X", **facts) for passage in world.PASSAGES.values()),
        *(f'{{"name": "search", "arguments": {{"query": "{name} of X"}}}}' for name in world.RELATIONS),
        'system\nuser\nassistant\ntool\n# Tools\nCall: {"name": ..., "arguments": {...}}\n\n',
        "Answer: X. No results. Answer:\n- X",
        " ".join(_COMMON_WORDS.split()),
        " " + " ".join(names.WORLD_WORDS),
    ]


def build_tokenizer() -> Any:
    """The tokenizer as a ``tokenizers.Tokenizer`` of exactly :data:`VOCAB_SIZE` tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    def pre_tokenizer() -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    pieces: dict[str, None] = {}
    splitter = pre_tokenizer()
    for text in _texts():
        pieces.update((piece, None) for piece, _ in splitter.pre_tokenize_str(text))
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = [piece for piece in pieces if len(piece) > 1]
    num_added = len(SPECIAL_TOKENS) + len(MARKUP_TOKENS)
    num_merged = VOCAB_SIZE - num_added - len(byte_tokens) - len(whole)
    if num_merged < 0:
        raise ValueError(f"{len(whole)} whole words leave no room in a vocabulary of {VOCAB_SIZE} tokens")

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizer()
    trained.train_from_iterator(
        [_MERGE_TEXT, _COMMON_WORDS],
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, initial_alphabet=byte_tokens, show_progress=False, special_tokens=[]
        ),
    )
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    vocab = {token: i for i, token in enumerate((*byte_tokens, *whole))}
    kept = []
    for left, right in merges:
        if left not in vocab or right not in vocab:
            continue
        if left + right not in vocab:
            if len(vocab) == VOCAB_SIZE - num_added:
                continue
            vocab[left + right] = len(vocab)
        kept.append((left, right))
    for i in range(VOCAB_SIZE - num_added - len(vocab)):
        vocab[f"<unused{i}>"] = len(vocab)

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=kept, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return tokenizer


def chat_template() -> str:
    """The demo model's chat template, in the style of Qwen3's."""
    return (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def save_tokenizer(directory: str | Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template) into ``directory``."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": chat_template(),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
