#!/bin/sh
# Builds wheel and sdist, checks both, and tries the wheel in an empty environment: sh requirements/package.sh PYTHON DIST
# Called by `make package`.
set -eu

python=$1 dist=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip="--disable-pip-version-check --retries 3 --timeout 60"

"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip $pip install -qq "build>=1.2" "twine>=6"
rm -rf "$dist"
"$work/tools/bin/python" -m build --outdir "$dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
"$work/tools/bin/python" -m twine check --strict "$dist"/*

"$python" -m venv "$work/empty"
"$work/empty/bin/python" -m pip $pip install -qq "$dist"/*.whl
cd "$work"  # not beside the sources
empty/bin/agentrl version >/dev/null
empty/bin/agentrl env check calculator
empty/bin/agentrl env new first --dir "$work/first" >/dev/null
empty/bin/python - <<'CHECK'
from importlib.resources import files

package = files("agentrl")
for name in ("py.typed", "assets/demo/model.safetensors", "assets/demo/tokenizer.json"):
    assert package.joinpath(name).is_file(), f"{name} is not in the wheel"
CHECK
echo "the wheel works in an empty environment"
