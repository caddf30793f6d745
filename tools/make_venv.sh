#!/usr/bin/env bash
# Make the virtual environment $1 from requirements.txt, with the Python $2 or the first 3.11 to 3.14 on the PATH.
# Quiet where it works; where it does not, the last lines of what pip said, and one sentence. Bounded: INSTALL_TIMEOUT seconds.
set -euo pipefail

venv=$1
chosen=${2:-}
limit=${INSTALL_TIMEOUT:-1500}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

fail() {
    tail -n 25 "$log" >&2
    echo "$1" >&2
    exit 1
}

suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

python=""
for name in ${chosen:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if suits "$name"; then
        python=$name
        break
    fi
done
[ -n "$python" ] || fail "Millrace needs Python 3.11 to 3.14: install it, or name one: make venv PYTHON=/path/to/python3.11"

echo "Installing the pinned requirements into $venv (once, about a minute)."
rm -rf "$venv"
if ! "$python" -m venv "$venv" >"$log" 2>&1; then
    rm -rf "$venv"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        # Debian ships venv apart from Python.
        minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        { apt-get -q update; DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -q -y install "python$minor-venv"; } >>"$log" 2>&1 || true
    fi
    "$python" -m venv "$venv" >>"$log" 2>&1 || fail "This Python cannot make virtual environments: install its venv module (Debian: sudo apt-get install python3-venv)."
fi

# uv installs in a third of the time; where it is not to be had, or not reachable by its own settings, pip does it.
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
if ! { timeout 120 "${pip[@]}" install -q --require-hashes -r tools/uv.txt &&
    timeout "$limit" "$venv/bin/uv" pip install -q --python "$venv/bin/python" --require-hashes -r requirements.txt; } >"$log" 2>&1; then
    timeout "$limit" "${pip[@]}" install -q --require-hashes -r requirements.txt >"$log" 2>&1 ||
        fail "The requirements could not be installed; is the package index reachable?"
fi

# The package itself stands in include/: a path file and a launcher need no build.
"$venv/bin/python" - "$PWD/include" <<'PYTHON'
import pathlib
import sys
import sysconfig

pathlib.Path(sysconfig.get_path("purelib"), "millrace.pth").write_text(sys.argv[1] + "\n")
launcher = pathlib.Path(sysconfig.get_path("scripts"), "millrace")
launcher.write_text(f"#!{sys.executable}\nfrom millrace.__main__ import main\n\nmain()\n")
launcher.chmod(0o755)
PYTHON
