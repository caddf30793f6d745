#!/usr/bin/env bash
# Lint the chart, render it, and check what comes out against Kubernetes' own schemas; the result stands in tools/shipping/rendered.
# `chart.sh --check` changes nothing, and ends with 1 where something else would come out; `chart.sh --helm` says where helm is;
# `chart.sh --validate FILE` checks another file. It is built from
# its Go module into the cache, once (HELM=/path/to/helm takes another); the schemas come with the package kubernetes-validate, into the cache too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

HELM_VERSION=v3.22.0
KUBERNETES=1.29

cache=${MILLRACE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/millrace}/helm
lock=tools/shipping/validate.txt
venv=$cache/kubernetes-validate-$(sha256sum $lock | cut -c1-12)
if [ ! -x "$venv/bin/kubernetes-validate" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q --disable-pip-version-check --require-hashes -r $lock
fi
if [ "${1:-}" = --validate ]; then
    exec "$venv/bin/kubernetes-validate" -k "$KUBERNETES" --strict "$2"
fi
helm=${HELM:-$cache/helm-$HELM_VERSION}
if [ ! -x "$helm" ]; then
    command -v go >/dev/null || { echo "helm is not there, and Go, which builds it, neither: set HELM=/path/to/helm" >&2; exit 2; }
    mkdir -p "$cache"
    GOBIN=$cache go install "helm.sh/helm/v3/cmd/helm@$HELM_VERSION"
    mv "$cache/helm" "$helm"
fi
[ "${1:-}" != --helm ] || { echo "$helm"; exit; }

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$helm" lint --strict tools/shipping/chart
for values in full cluster; do
    "$helm" lint --strict tools/shipping/chart -f tools/shipping/values/$values.yaml
    "$helm" template pipes tools/shipping/chart --kube-version "$KUBERNETES" -f tools/shipping/values/$values.yaml >"$out/$values.yaml"
done
"$helm" template pipes tools/shipping/chart --kube-version "$KUBERNETES" >"$out/default.yaml"
keyless=store.tables=s3://warehouse/millrace,store.metaStore=mariadb://mariadb:3306/millrace,store.log=kafka://kafka:9092/millrace
for wrong in config.server.httpPort=70000 cluster.enabled=true store.log=rocksmq store.tls.secret=tls "$keyless"; do
    if "$helm" template pipes tools/shipping/chart --kube-version "$KUBERNETES" --set "$wrong" >/dev/null 2>&1; then
        echo "the wrong value $wrong was taken" >&2
        exit 1
    fi
done
"$venv/bin/kubernetes-validate" -k "$KUBERNETES" --strict "$out"/*.yaml
(cd tools/shipping && find chart values -type f | LC_ALL=C sort | xargs sha256sum) >"$out/chart.sha256"
if [ "${1:-}" = --check ]; then
    diff -ru tools/shipping/rendered "$out"
else
    rm -rf tools/shipping/rendered
    mkdir -p tools/shipping/rendered
    cp "$out"/* tools/shipping/rendered/
fi
echo "the chart is rendered, and valid by Kubernetes $KUBERNETES"
