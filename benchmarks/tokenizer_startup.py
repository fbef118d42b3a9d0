"""CPU time of ``ChatTemplate`` at start, against transformers' own load of the same tokenizer.

Give folders of real checkpoints or tokenizers; without any, one with 128,000 made-up words is built. Each load runs
in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TARGET = 1.5
WORDS = 128_000
_TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_MEASURE = """
import sys, time
from transformers import AutoTokenizer
import agentrl.rollout.template.chat, numpy, jinja2, regex, transformers.utils.chat_template_utils
AutoTokenizer.from_pretrained(sys.argv[3])
start = time.process_time()
if sys.argv[1] == "transformers":
    AutoTokenizer.from_pretrained(sys.argv[2])
else:
    agentrl.rollout.template.chat.ChatTemplate(sys.argv[2])
print(time.process_time() - start)
"""


def build(folder: Path, words: int) -> Path:
    """A byte-level BPE tokenizer with ``words`` merges: syllables, then pairs of what there is."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    parts, merges = [letter for letter in alphabet if letter.isascii() and letter.isalpha()], []
    while len(merges) < words:
        left, right = rng.choice(parts), rng.choice(parts)
        if len(left + right) <= 12 and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
            parts.append(left + right)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    whole = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=_TEMPLATE)
    whole.save_pretrained(folder)
    return folder


def seconds(what: str, folder: Path, small: Path, repeats: int) -> float:
    """Median CPU seconds of loads in fresh processes; ``small`` is loaded before the clock starts, for the imports."""
    command = [sys.executable, "-c", _MEASURE, what, str(folder), str(small)]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(repeats)]
    return statistics.median(float(run.split()[-1]) for run in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders with a tokenizer.json")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        small = build(Path(scratch) / "small", 100)
        for folder in options.folders or [build(Path(scratch) / "large", WORDS)]:
            own, theirs = (seconds(what, folder, small, options.repeats) for what in ("agentrl", "transformers"))
            ratios.append(own / theirs)
            print(f"{folder.name}: ChatTemplate {own:.2f} s CPU, transformers {theirs:.2f} s: {own / theirs:.2f} times")
    result = {"benchmark": "tokenizer_startup", "ratio": round(max(ratios), 3), "target": TARGET}
    print(json.dumps(result))
    return int(result["ratio"] > TARGET)


if __name__ == "__main__":
    sys.exit(main())
