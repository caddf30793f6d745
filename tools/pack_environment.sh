#!/usr/bin/env bash
# Pack what Spark's executors need into $2: this wheel, its libraries as locked, and Python. $1 is the folder with the environment's programs.
# Executors unpack it; their machines need the same Python at the same path, and nothing else of Millrace.
set -euo pipefail

uv=$1/uv
archive=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python=$("$1/python" -c 'import sys; print(sys._base_executable)')
"$uv" venv -q --relocatable --python "$python" "$folder/environment"
"$uv" build -q --wheel --out-dir "$folder/wheel"
wheel=$(echo "$folder"/wheel/*.whl)
"$uv" pip install -q --python "$folder/environment/bin/python" --link-mode copy -c <(sed -e '/^ *--hash=/d' -e 's/ \\$//' requirements.txt) \
    "millrace[executor] @ file://$wheel"
ln -s python "$folder/environment/bin/millrace-python"
mkdir -p "$(dirname "$archive")"
tar -C "$folder/environment" -c . | gzip -1 >"$archive.new"
mv "$archive.new" "$archive"
