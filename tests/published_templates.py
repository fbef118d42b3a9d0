"""Chat templates as model makers publish them, fetched from the package index: none is copied into this repository.

llama.cpp keeps dozens of them for its own tests, and the source archive of ``llama-cpp-python`` carries them. pip
fetches and checks the archive once a machine; the templates alone are kept, in the user's cache folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

_PACKAGE, _VERSION = "llama-cpp-python", "0.3.36"
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_INSIDE = "/vendor/llama.cpp/models/templates/"
_FETCH_SECONDS = 150
# pip asks a source archive for its metadata even where it is only to be downloaded. This answers in the place of the
# archive's own build backend, which would have to be installed with compilers' helpers for it.
_BACKEND = f'''
import os
def prepare_metadata_for_build_wheel(directory, *_):
    name = "{_PACKAGE.replace("-", "_")}-{_VERSION}.dist-info"
    os.makedirs(os.path.join(directory, name))
    with open(os.path.join(directory, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {_PACKAGE}\\nVersion: {_VERSION}\\n")
    return name
'''


def published_templates() -> Path:
    """Folder of published templates, ``<family>.jinja`` each. Skips the test where the index cannot be reached."""
    found = _found()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def published_template(name: str) -> str:
    """The jinja source of one, by its file's name without the ending."""
    return (published_templates() / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def _found() -> Path | str:
    """The folder, or why there is none."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl-tests"
    folder = home / f"{_PACKAGE}-{_VERSION}-templates"
    if folder.is_dir():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        archive = _fetched(Path(scratch))
        if isinstance(archive, str):
            return archive
        made = _unpacked(archive, Path(scratch) / "templates")
        try:
            made.rename(folder)
        except OSError:  # another test process was first
            shutil.rmtree(made)
    return folder


def _fetched(scratch: Path) -> Path | str:
    backend = scratch / "backend" / "scikit_build_core"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build.py").write_text(_BACKEND)
    (scratch / "wanted.txt").write_text(f"{_PACKAGE}=={_VERSION} --hash=sha256:{_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "--no-build-isolation"]
    command += ["--retries", "1", "--no-binary", _PACKAGE, "-r", str(scratch / "wanted.txt")]
    environment = {**os.environ, "PYTHONPATH": str(backend.parent), "TMPDIR": str(scratch)}
    try:
        done = subprocess.run(
            [*command, "-d", str(scratch / "got")],
            env=environment, capture_output=True, text=True, timeout=_FETCH_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"the package index did not give {_PACKAGE} within {_FETCH_SECONDS} s"
    if done.returncode:
        return f"pip cannot fetch {_PACKAGE}=={_VERSION}: {''.join(done.stderr.strip().splitlines()[-1:])}"
    (archive,) = (scratch / "got").iterdir()
    return archive


def _unpacked(archive: Path, folder: Path) -> Path:
    folder.mkdir()
    with tarfile.open(archive) as members:
        for member in members:
            if _INSIDE in member.name and member.name.endswith(".jinja"):
                (folder / Path(member.name).name).write_bytes(members.extractfile(member).read())
    return folder
