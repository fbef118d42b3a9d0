#!/bin/sh
# Makes a virtual environment from the lock file: sh requirements/install.sh PYTHON VENV LOCK TORCH_CPU_INDEX
# Called by `make venv`. Every package is pinned and installed without its own requirements, because SGLang's
# name gigabytes of CUDA packages that a CPU has no use for.
set -eu

python=$1 venv=$2 lock=$3 torch_index=$4

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 || fail "there is no $python; give the path of Python 3.11 or newer: make venv PYTHON=python3.11"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is $("$python" -V 2>&1), 3.11 or newer is needed: make venv PYTHON=python3.11"
"$python" -c 'import platform, sys; sys.exit((platform.system(), platform.machine()) != ("Linux", "x86_64"))' ||
    fail "training needs Linux on x86-64; writing and checking environments works here too: pip install -e ."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module; install it (Debian, Ubuntu: apt-get install python3-venv)"

free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
[ "$free_mb" -ge 5000 ] || fail "5 GB of free disk space are needed here, there are $free_mb MB"

echo "making $venv with $("$python" -V 2>&1)"
# A folder that an interrupted set-up left behind is completed, not trusted: pip checks every package anyway.
"$python" -m venv "$venv" || fail "the virtual environment $venv cannot be made"
pip="$venv/bin/python -m pip --disable-pip-version-check --retries 3 --timeout 60"

torch=$(grep '^torch==' "$lock")
# A few seconds decide; in a closed network the connection would hang for minutes.
reachable='import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5).close()'
if "$venv/bin/python" -c "$reachable" "$torch_index" 2>/dev/null; then
    echo "installing $torch from PyTorch's index of CPU builds"
    $pip install -qq --no-deps --index-url "$torch_index" "$torch" || fail "$torch could not be installed from $torch_index"
else
    echo "PyTorch's index of CPU builds cannot be reached; installing $torch from pip's index"
    $pip install -qq --no-deps "$torch" || fail "$torch could not be installed from pip's index"
fi
# Read, not imported: what torch needs is not there yet.
version_file='import os, runpy, sysconfig; print(runpy.run_path(os.path.join(sysconfig.get_path("platlib"), "torch", "version.py"))["cuda"])'
[ "$("$venv/bin/python" -c "$version_file")" = None ] ||
    fail "the torch that pip's index offers is not a CPU build. Open the way to $torch_index, or name an index that has one: make venv TORCH_CPU_INDEX=URL"

echo "installing $(grep -c '==' "$lock") pinned packages (2 to 4 minutes)"
$pip install -qq --no-deps -r "$lock" || fail "some packages could not be installed; the lines above name them. Running the same command again goes on"
$pip install -qq --no-deps --no-build-isolation -e . || fail "agentrl itself could not be installed from this folder"
"$venv/bin/agentrl" version >/dev/null || fail "agentrl is installed but does not start: $venv/bin/agentrl version"
echo "done: $venv"
