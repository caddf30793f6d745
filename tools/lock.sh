#!/usr/bin/env bash
# Resolve requirements.in into requirements.txt, and uv itself into tools/uv.txt, with uv; $1 is the folder with this environment's programs.
set -euo pipefail

uv=$1/uv
[ -x "$uv" ] || "$1/python" -m pip -q --disable-pip-version-check install --require-hashes -r tools/uv.txt
version=$("$uv" --version | cut -d' ' -f2)
{
    echo "# What installs the rest, pinned as that is. Made by \`make lock\`: the version of uv that the environment has."
    "$uv" pip compile -q --generate-hashes --no-emit-index-url --no-header --no-annotate - <<<"uv==$version"
} >tools/uv.txt.new
mv tools/uv.txt.new tools/uv.txt
{
    echo "# The full lock of requirements.in: Linux, Python 3.11 to 3.14. Made by \`make lock\`; edit requirements.in instead."
    "$uv" pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header requirements.in
} >requirements.txt.new
mv requirements.txt.new requirements.txt
# What the images hold: of the same versions, the same for every architecture.
lock=tools/shipping/requirements.txt
{
    echo "# What the images hold, with the hashes of every architecture. Made by \`make lock\`."
    "$uv" pip compile -q --python-version 3.11 --python-platform x86_64-unknown-linux-gnu --only-binary :all: --generate-hashes --no-emit-index-url \
        --no-header --no-annotate --extra pipelines --extra objects -c <(sed -e '/^ *--hash=/d' -e 's/ \\$//' requirements.txt) pyproject.toml
} >"$lock.new"
mv "$lock.new" "$lock"
# What checks the chart of the pipelines; in an environment of its own, so that nothing of it has to fit the rest.
lock=tools/shipping/validate.txt
{
    echo "# What checks the rendered chart against Kubernetes' schemas (chart.sh), pinned as the rest is. Made by \`make lock\`."
    "$uv" pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate - <<<"kubernetes-validate==1.37.0"
} >"$lock.new"
mv "$lock.new" "$lock"
