#!/usr/bin/env bash
# The Helm chart on a real cluster: install, chat, `helm test`, upgrade with open streams, pods of
# worker, scheduler and gateway deleted and a node drained in the middle of eight streams, a group of
# three ranks in three pods, two replicas of which one is killed. Every stream must end, with the text
# that it has in peace. Skipped where there is no cluster.
#
#   tests/deploy/k8s_e2e.sh [PART...]     parts: base upgrade worker scheduler gateway drain group replicas words
#
# Needs kubectl and helm with access to the cluster, whose nodes must have the images or be able to pull
# them: IMAGE_REGISTRY, IMAGE_TAG, PULL_POLICY (Never). All is in NAMESPACE (surestep-e2e), which is
# removed at the end unless KEEP is set; with KEEP a further run goes on with what is there. TOKENS (500) is the
# length of the streams: on a quiet machine they should outlive an upgrade.
set -euo pipefail
cd "$(dirname "$0")/../.."

skip() { echo "SKIPPED k8s_e2e: $1"; exit 0; }
command -v kubectl >/dev/null || skip "kubectl is not installed"
command -v helm >/dev/null || skip "helm is not installed"
kubectl version --request-timeout 5s >/dev/null 2>&1 || skip "no Kubernetes cluster answers"

namespace=${NAMESPACE:-surestep-e2e} scratch=$(mktemp -d) streams=
[ $# -gt 0 ] || set -- base upgrade worker scheduler gateway drain group replicas words
k() { kubectl -n $namespace "$@"; }
say() { echo "[$SECONDS s] $*"; }

finish() {
  local status=$?
  [ -z "$streams" ] || kill "$streams" 2>/dev/null || true
  if [ $status != 0 ]; then
    k get pods -o wide || true
    k get events --sort-by .lastTimestamp | tail -15 || true
    for pod in $(k get pods -o name -l app.kubernetes.io/part-of=surestep); do
      echo "--- $pod"; k logs --all-containers --tail 15 "$pod" || true
    done
  fi
  [ -n "${KEEP:-}" ] || kubectl delete namespace $namespace --wait=false >/dev/null 2>&1 || true
  rm -rf "$scratch"
  exit $status
}
trap finish EXIT

# chart install|upgrade RELEASE ARGUMENTS...: waits until it serves.
chart() {
  local command=$1 release=$2 args=(--set "image.pullPolicy=${PULL_POLICY:-Never}")
  shift 2
  [ -z "${IMAGE_REGISTRY:-}" ] || args+=(--set "image.registry=$IMAGE_REGISTRY")
  [ -z "${IMAGE_TAG:-}" ] || args+=(--set "image.tag=$IMAGE_TAG")
  # The machine of a test is small.
  for service in gateway scheduler workers; do
    args+=(--set "$service.resources.requests.cpu=50m" --set "$service.resources.requests.memory=128Mi")
  done
  helm "$command" "$release" charts/surestep -n $namespace -f charts/surestep/examples/one-cpu-node.yaml \
    "${args[@]}" --wait --timeout 15m "$@" >"$scratch/notes"
}

release=e2e model=SmolLM2-135M-Instruct
# By address: names are the cluster's business, and small ones forget them under load.
run_streams() {
  local address; address=$(k get service $release-surestep-smollm2-gateway -o jsonpath='{.spec.clusterIP}')
  k exec -i client -- python - "http://$address" $model "${1:-8}" "${2:-${TOKENS:-500}}" <tests/deploy/k8s_streams.py
}

# Eight streams in the background; returns when all of them have some text.
begin() {
  : >"$scratch/lines"  # those of the streams before say "open" as well
  run_streams "$@" >"$scratch/lines" 2>"$scratch/stderr" &
  streams=$!
  until grep -qx open "$scratch/lines"; do
    kill -0 $streams 2>/dev/null || { cat "$scratch/lines" "$scratch/stderr"; return 1; }
    sleep 0.2
  done
}

# Does what is said; fails if the streams were over before.
amid() {
  "$@"
  ! grep -q '^{' "$scratch/lines" || { echo "the streams had ended already: more TOKENS" >&2; return 1; }
}

end() { # NAME: all streams end, with the texts that they have in peace
  wait "$streams" || { cat "$scratch/lines" "$scratch/stderr"; return 1; }
  streams=
  tail -n 1 "$scratch/lines" >"$scratch/$1"
  python3 - "$scratch/$1" "$scratch/${2:-peace}" <<'PYTHON'
import json, sys
got, peace = (json.load(open(path)) for path in sys.argv[1:])
assert not got["errors"], got["errors"]
same = sum(a == b for a, b in zip(got["texts"], peace["texts"], strict=True))
assert same == len(got["texts"]), f"{same} of {len(got['texts'])} streams have the same text"
print(f"    {same} streams, same texts, longest pause {got['pause']} s")
PYTHON
}

peace() { # FILE: the texts that nobody disturbs
  run_streams "${2:-8}" | tail -n 1 >"$scratch/$1"
  python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); assert not d["errors"], d; print("    longest pause", d["pause"], "s")' "$scratch/$1"
}

# The pod of a service that nobody has deleted yet.
pod() {
  k get pods -l "app.kubernetes.io/instance=$release,app.kubernetes.io/component=$1${2:+,$2}" \
    -o 'go-template={{range .items}}{{if not .metadata.deletionTimestamp}}pod/{{.metadata.name}}{{"\n"}}{{end}}{{end}}' | sed -n 1p
}

part_base() {
  say "install"
  # That of the run before may still be on its way out.
  [ "$(kubectl get namespace $namespace -o jsonpath='{.status.phase}' 2>/dev/null)" != Terminating ] ||
    kubectl wait --for delete "namespace/$namespace" --timeout 600s >/dev/null
  kubectl create namespace $namespace >/dev/null 2>&1 || true
  chart upgrade e2e --install
  say "installed, ready"
  k get pod client >/dev/null 2>&1 || k run client --image "${IMAGE_REGISTRY:+$IMAGE_REGISTRY/}surestep-gateway:${IMAGE_TAG:-0.1.0}" \
    --image-pull-policy "${PULL_POLICY:-Never}" --restart Never --command -- sleep 1000000 >/dev/null
  k wait --for condition=Ready pod/client --timeout 120s >/dev/null
  say "helm test"
  helm test e2e -n $namespace --logs --timeout 5m >"$scratch/test"
  grep -E "Phase|says" "$scratch/test"
  grep -q Paris "$scratch/test"
  say "eight streams in peace"
  peace peace
}

part_upgrade() {
  say "upgrade of all services with eight open streams"
  begin
  local before; before=$(k get pods -o name -l app.kubernetes.io/instance=e2e)
  chart upgrade e2e --set models[0].name=smollm2 --set models[0].settings.max_num_seqs=24 \
    --set gateway.podAnnotations.upgraded=yes --set scheduler.podAnnotations.upgraded=yes
  say "upgraded"
  end upgrade
  for service in gateway scheduler worker; do
    ! grep -q "$(pod $service)" <<<"$before" || { echo "$(pod $service) was not replaced"; return 1; }
  done
}

deleted() {
  local one; one=$(pod "$1")
  say "kubectl delete $one with eight open streams"
  begin
  amid k delete "$one" --wait=false >/dev/null
  end "$1"
  say "over"
  k rollout status deployment/e2e-surestep-smollm2-gateway --timeout 300s >/dev/null
}
part_worker() { deleted worker; }
part_scheduler() { deleted scheduler; }
part_gateway() { deleted gateway; }

part_drain() {
  local node; node=$(k get "$(pod worker)" -o jsonpath='{.spec.nodeName}')
  say "drain of $node with eight open streams"
  begin
  kubectl drain "$node" --pod-selector app.kubernetes.io/instance=e2e --delete-emptydir-data --ignore-daemonsets \
    --timeout 600s >"$scratch/drain" 2>&1 &
  local draining=$!
  # Where this is the only node, its pods cannot come back before they may: streams wait, and the
  # gateway for them.
  until [ "$(k get pods -l app.kubernetes.io/instance=e2e -o jsonpath='{range .items[?(@.metadata.deletionTimestamp)]}x{end}' | wc -c)" -ge 3 ] \
    || ! kill -0 $draining 2>/dev/null; do sleep 0.5; done
  amid say "evicted"
  kubectl uncordon "$node" >/dev/null
  end drain
  wait $draining || { cat "$scratch/drain"; return 1; }
  grep -c evict "$scratch/drain" >/dev/null
  k rollout status deployment/e2e-surestep-smollm2-gateway --timeout 300s >/dev/null
}

with_models() { echo --set modelCache.existingClaim=e2e-surestep-smollm2-models --set models[0].name=smollm2; }

part_group() {
  say "three ranks in three pods"  # two do not divide the heads of this model
  # shellcheck disable=SC2046
  chart install group $(with_models) --set models[0].tensorParallelSize=3 --set models[0].podsPerReplica=3
  release=group
  say "ready; four streams in peace"
  # On a small machine three ranks are slow.
  local TOKENS=$((${TOKENS:-500} / 2))
  peace group-peace 4
  for rank in 1 0; do
    say "kubectl delete of the pod of rank $rank with four open streams"
    begin 4
    amid k delete "$(pod worker surestep.dev/pod=$rank)" --wait=false >/dev/null
    end "group-$rank" group-peace
  done
  helm uninstall group -n $namespace --wait >/dev/null
  release=e2e
}

part_replicas() {
  say "two replicas behind one gateway"
  # shellcheck disable=SC2046
  chart install pair $(with_models) --set models[0].replicas=2
  release=pair
  say "ready; worker and scheduler of one of them deleted with eight open streams"
  begin
  amid k delete pod pair-surestep-smollm2-worker-0 --wait=false >/dev/null
  amid k delete pod -l app.kubernetes.io/instance=pair,surestep.dev/replica=0 --wait=false >/dev/null
  end replicas
  helm uninstall pair -n $namespace --wait >/dev/null
  release=e2e
}

# What is wrong is told in words, by NOTES or by an event.
part_words() {
  say "a missing Secret, an image that is not there, a GPU that is not there"
  helm install wrong charts/surestep -n $namespace --set apiKeys.existingSecret=no-keys --set image.tag=none \
    --set image.pullPolicy=IfNotPresent --set workers.device=cuda --set modelCache.kind=emptyDir >"$scratch/notes"
  grep -q "create secret generic no-keys" "$scratch/notes"
  local events; until events=$(k get events -o jsonpath='{range .items[*]}{.involvedObject.name}{": "}{.message}{"\n"}{end}') &&
    grep -q 'wrong.*secret "no-keys" not found' <<<"$events" &&
    grep -q 'wrong.*Insufficient nvidia.com/gpu' <<<"$events" &&
    grep -q 'wrong-surestep-default-scheduler.*pull' <<<"$events"; do
    [ $SECONDS -lt 6000 ]; sleep 2
  done
  grep -E 'wrong.*(not found|Insufficient|Failed to pull)' <<<"$events" | sort -u | sed 's/^/    /'
  helm uninstall wrong -n $namespace >/dev/null
  say "NetworkPolicies, as the cluster takes them"
  helm template e2e charts/surestep -n $namespace --set networkPolicy.enabled=true --show-only templates/network.yaml |
    k apply --dry-run=server -f - | sed 's/^/    /'
}

case " $* " in *" base "*) ;; *) peace peace ;; esac
for part in "$@"; do "part_$part"; done
say "PASSED k8s_e2e: $*"
