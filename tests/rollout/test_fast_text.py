
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import CONTROLS, MARKUP, make_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from yardstick import within

from agentrl.rollout.template.encoding import ProvenanceTokenizer
from agentrl.rollout.template.fast_text import ByteDecoder, WordEncoder, packed

# How GPT-2, Qwen2/3, Llama 3 and GPT-4o cut text into words.
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "gpt2": None,
    "qwen": ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST,
    "llama3": ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST,
    "gpt4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t)?|\p{N}{1,3}" + REST,
}


@pytest.fixture(scope="module", params=SPLITS)
def tokenizer(request):
    split = SPLITS[request.param]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer = Tokenizer(models.BPE())
    steps = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_of]) if steps else bytes_of
    tokenizer.decoder = decoders.ByteLevel()
    if request.param == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["it's the cat that sat on café 2024, don't we?\n\n def f(x): return x"] * 5, trainer)
    return tokenizer, WordEncoder.of(tokenizer), ByteDecoder.of(tokenizer)


_TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab  1'\n\t.,é–中\u00a0")), max_size=80)


@settings(max_examples=150, deadline=None)
@given(text=_TEXT)
def test_words_give_the_tokenizers_ids(tokenizer, text):
    tokenizer, encoder, _ = tokenizer
    for _ in range(2):  # learned, then looked up
        ids = encoder.encode(text)
        assert ids is None or ids == packed(tokenizer.encode(text, add_special_tokens=False).ids)
    assert ids is not None or not text.isprintable()


@pytest.mark.parametrize("text", [" " * 300_000, "\n" + " " * 300_000, "a" + " " * 300_000 + "b", "a\n " * 100_000])
def test_much_white_space_costs_no_more_than_its_length(tokenizer, text):
    tokenizer, encoder, _ = tokenizer
    ids = within(100, lambda: encoder.encode(text), tries=1)
    assert ids is None or ids == packed(tokenizer.encode(text, add_special_tokens=False).ids)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_table_gives_the_tokenizers_text(tokenizer, data):
    tokenizer, _, decoder = tokenizer
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=60))
    assert decoder.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.one_of(_TEXT, st.sampled_from(CONTROLS + MARKUP)), max_size=8))
def test_rendered_text_has_the_ids_of_the_models_own_tokenizer(pieces):
    text = "".join(pieces)
    assert FAST.encode(text).tolist() == READER.encode(text, add_special_tokens=False).ids
    assert SLOW.encode(text).tolist() == FAST.encode(text).tolist()
    assert SLOW.encode_content(text).tolist() == FAST.encode_content(text).tolist()
    assert SLOW.decode(SLOW.encode(text)) == FAST.decode(FAST.encode(text))


READER = make_tokenizer().backend_tokenizer
FAST = ProvenanceTokenizer(READER)
SLOW = ProvenanceTokenizer(READER)
assert SLOW._words is not None and SLOW._decoder is not None
SLOW._words = SLOW._decoder = None


def test_an_expression_that_passes_over_text_is_noticed():
    tokenizer = make_tokenizer().backend_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[a-z]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    encoder = ProvenanceTokenizer(tokenizer)
    assert encoder.encode("ab 12 cd").tolist() == tokenizer.encode("ab 12 cd", add_special_tokens=False).ids


def test_other_tokenizers_go_their_own_way():
    whole = Tokenizer(models.WordLevel({"[UNK]": 0, "<|end|>": 1, "the": 2, "cat": 3}, unk_token="[UNK]"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole.normalizer = normalizers.Lowercase()
    whole.add_special_tokens(["[UNK]", "<|end|>"])
    encoder = ProvenanceTokenizer(whole)
    assert encoder._words is None
    assert encoder.encode("the cat<|end|>the").tolist() == [2, 3, 1, 2]
    # In the vocabulary of the model and reached by lower-casing: still not a control token.
    assert encoder.encode_content("cat <|end|> the <|END|>").tolist() == [3, 0, 2, 0]

    first = Tokenizer(models.BPE(unk_token="<unk>"))
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<s>"], show_progress=False)
    first.train_from_iterator(["the cat sat"], trainer)
    encoder = ProvenanceTokenizer(first)
    whole_ids = first.encode("the cat<s>sat", add_special_tokens=False).ids
    assert encoder.encode("the cat<s>sat").tolist() == whole_ids
    after = encoder.encode_after_control("sat").tolist()
    assert whole_ids[-len(after) :] == after


def test_a_control_token_that_takes_white_space_with_it():
    tokenizer = make_tokenizer().backend_tokenizer
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])
    encoder = ProvenanceTokenizer(tokenizer)
    for text in ("a<|end|>\n b", "a<|end|> <|im_end|>\n"):
        assert encoder.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_runs_of_spaces_as_added_tokens_are_ordinary_text():
    tokenizer = make_tokenizer().backend_tokenizer
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])
    encoder = ProvenanceTokenizer(tokenizer)
    text = "if x:\n    return <|im_end|>    y"
    ids = encoder.encode_content(text)
    assert tokenizer.token_to_id("    ") in ids and 2 not in ids
    assert encoder.decode(ids) == text


def test_lone_surrogates_are_replaced():
    assert FAST.decode(FAST.encode_content("a\ud800b")) == "a?b"


def test_ids_beyond_the_vocabulary_decode_to_nothing():
    assert FAST.decode(np.array([10**6])) == ""
