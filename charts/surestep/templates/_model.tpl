{{- /*
A model with everything that its objects are made of, as YAML: the values of the release with those of
the model merged over them, and what follows from these. Arguments: root, model.
*/}}
{{- define "surestep.model" -}}
{{- $root := .root }}{{ $model := deepCopy .model }}
{{- range $part := list "gateway" "scheduler" "workers" "modelCache" }}
{{- $own := default dict (get $model $part) }}
{{- $_ := set $model $part (mergeOverwrite (deepCopy (get $root.Values $part)) $own) }}
{{- end }}
{{- $workers := $model.workers }}
{{- if not $workers.image.repository }}
{{- $_ := set $workers.image "repository" (ternary "surestep-worker-cuda" "surestep-worker" (eq $workers.device "cuda")) }}
{{- end }}
{{- $_ := set $model "name" (default (include "surestep.modelName" $model.source) $model.name) }}
{{- $base := printf "%s-%s" (include "surestep.fullname" $root) $model.name | trunc 43 | trimSuffix "-" }}
{{- $source := default "" $model.source }}
{{- $replicas := int (default 1 $model.replicas) }}
{{- $ranks := int (default 1 $model.tensorParallelSize) }}
{{- $pods := int (default 1 $model.podsPerReplica) }}
{{- $scaled := ne $workers.autoscaling.kind "none" }}
{{- /* Where one Service is for all, models behind the first are guests of its gateways. */}}
{{- $together := and $root.Values.gateway.shared (gt (len $root.Values.models) 1) }}
{{- $several := and (gt (len $root.Values.models) 1) (not $together) }}
{{- $host := first $root.Values.models }}
{{- $hostName := default (include "surestep.modelName" $host.source) $host.name }}
{{- $hostBase := printf "%s-%s" (include "surestep.fullname" $root) $hostName | trunc 43 | trimSuffix "-" }}
{{- $_ := set $model "base" $base }}
{{- $_ := set $model "together" $together }}
{{- $_ := set $model "gatewayBase" (ternary $hostBase $base $together) }}
{{- $_ := set $model "guest" (and $together (ne $base $hostBase)) }}
{{- $_ := set $model "source" $source }}
{{- $_ := set $model "replicas" $replicas }}
{{- $_ := set $model "scaled" $scaled }}
{{- $_ := set $model "sleeps" (and $scaled (eq (int $workers.autoscaling.minReplicas) 0)) }}
{{- $_ := set $model "maxReplicas" (ternary (int $workers.autoscaling.maxReplicas) $replicas $scaled) }}
{{- $_ := set $model "ranks" $ranks }}
{{- $_ := set $model "pods" $pods }}
{{- $_ := set $model "ranksPerPod" (div $ranks $pods) }}
{{- $_ := set $model "settings" (default dict $model.settings) }}
{{- /* A Deployment replaces a deleted pod at once, and one of a dead node; a StatefulSet upgrades replica by replica. */}}
{{- $kind := $workers.kind }}
{{- if eq $kind "auto" }}{{ $kind = ternary "StatefulSet" "Deployment" (or $scaled (gt $replicas 1)) }}{{ end }}
{{- $_ := set $model "kind" $kind }}
{{- $_ := set $model "path" (default (ternary (printf "/%s" $model.name) "/" $several) $model.gateway.path) }}
{{- $_ := set $model "clientName" (default (ternary "SmolLM2-135M-Instruct" $source (eq $source "")) (join "," $model.servedNames)) }}
{{- $fetched := and $model.modelCache.fetch (not (hasPrefix "/" $source)) }}
{{- $_ := set $model "fetched" $fetched }}
{{- /* A volume that one node can mount would keep gateways on the workers' node, where a taint keeps them off. */}}
{{- $shared := or (eq $model.modelCache.kind "hostPath") (has "ReadWriteMany" $model.modelCache.accessModes) }}
{{- $own := and $fetched (or (eq $model.modelCache.kind "emptyDir") (eq $model.modelCache.gateways "own") (and (eq $model.modelCache.gateways "auto") (not $shared))) }}
{{- $_ := set $model "gatewaysOwn" $own }}
{{- $link := printf "/models/served-%s" (printf "%s@%s" $source (default "" $model.revision) | sha256sum | trunc 8) }}
{{- $_ := set $model "folder" (ternary $source $link (hasPrefix "/" $source)) }}
{{- $_ := set $model "exec" (eq (include "surestep.grpcProbes" $root) "") }}
{{- toYaml $model }}
{{- end }}

{{- /* Name of a model that was given none, as `--set models[0].source=...` leaves it: the end of its source. */}}
{{- define "surestep.modelName" -}}
{{- default "default" (regexReplaceAll "[^a-z0-9-]+" (lower (base (default "" .))) "-" | trimAll "-" | trunc 30 | trimAll "-") }}
{{- end }}

{{- /* Not empty where the kubelet asks gRPC services for their health itself. */}}
{{- define "surestep.grpcProbes" -}}
{{- $wish := toString .Values.probes.grpc }}
{{- if or (eq $wish "true") (and (eq $wish "auto") (semverCompare ">=1.24.0-0" .Capabilities.KubeVersion.Version)) }}yes{{ end }}
{{- end }}

{{- /* host:port of each rank of a replica as JSON. Arguments: m, replica, port. */}}
{{- define "surestep.rankAddresses" -}}
{{- $all := list }}
{{- range $rank := until (int .m.ranks) }}
{{- $pod := div $rank (int $.m.ranksPerPod) }}
{{- $port := add $.port (mod $rank (int $.m.ranksPerPod)) }}
{{- $all = append $all (printf "%s-worker-%d-%d:%d" $.m.base (int $.replica) (int $pod) (int $port)) }}
{{- end }}
{{- toJson $all }}
{{- end }}

{{- /* What one service reads of the settings, over what the chart would have it. Arguments: root, m, service. */}}
{{- define "surestep.settings" -}}
{{- $m := .m }}
{{- $lists := .root.Files.Get "files/settings.json" | fromJson }}
{{- $known := get $lists .service }}
{{- $all := dict }}
{{- $entry := eq .service "entry" }}
{{- if $entry }}
{{- $known = list }}
{{- range $lists.gateway }}{{ if not (has . $lists.server) }}{{ $known = append $known . }}{{ end }}{{ end }}
{{- end }}
{{- $gateway := and (eq .service "gateway") (not $m.together) }}
{{- if and (eq .service "gateway") $m.together }}{{ $known = $lists.server }}{{ end }}
{{- if or $entry $gateway }}
{{- range $name := list "admission_timeout_s" "first_token_timeout_s" "inter_token_timeout_s" "resume_timeout_s" }}
{{- $_ := set $all $name $m.gateway.patienceSeconds }}
{{- end }}
{{- end }}
{{- range $name, $value := $m.settings }}
{{- if has $name $known }}{{ $_ := set $all $name $value }}{{ end }}
{{- end }}
{{- toYaml $all }}
{{- end }}

{{- /* The models of a shared gateway, as JSON. Arguments: root. */}}
{{- define "surestep.entries" -}}
{{- $all := list }}
{{- range $model := .Values.models }}
{{- $m := include "surestep.model" (dict "root" $ "model" $model) | fromYaml }}
{{- $own := include "surestep.settings" (dict "root" $ "m" $m "service" "entry") | fromYaml }}
{{- $wired := dict "name" $m.clientName "model" $m.folder "scheduler_url" (include "surestep.schedulers" (dict "root" $ "m" $m)) }}
{{- $all = append $all (merge $wired $own) }}
{{- end }}
{{- toJson $all }}
{{- end }}

{{- /* host:port of each scheduler of a model, or where gateways find them. Arguments: root, m. */}}
{{- define "surestep.schedulers" -}}
{{- $base := .m.base }}
{{- $urls := list }}
{{- range $i := until (int .m.maxReplicas) }}
{{- $urls = append $urls (printf "%s-scheduler-%d:50051" $base $i) }}
{{- end }}
{{- $places := dict "dns" (printf "dns://%s-schedulers:50051" $base) "kubernetes" (printf "k8s://%s/%s-schedulers:grpc" .root.Release.Namespace $base) }}
{{- default (join "," $urls) (get $places .m.scheduler.discovery) }}
{{- end }}

{{- /* The volume that a gateway has the text side of a model from. */}}
{{- define "surestep.gatewayVolume" -}}
{{- if .gatewaysOwn }}own{{ else if eq .modelCache.kind "hostPath" }}{{ .modelCache.hostPath }}{{ else }}{{ default (printf "%s-models" .base) .modelCache.existingClaim }}{{ end }}
{{- end }}

{{- /* What values mean only together. Arguments: root. */}}
{{- define "surestep.check" -}}
{{- $names := list }}
{{- range $model := .Values.models }}
{{- $m := include "surestep.model" (dict "root" $ "model" $model) | fromYaml }}
{{- $at := printf "models: %s:" $m.name }}
{{- if and (eq $m.modelCache.gateways "own") (not $m.fetched) }}{{ fail (printf "%s modelCache.gateways own fetches the model, and source or modelCache.fetch says that nothing is fetched" $at) }}{{ end }}
{{- if has $m.base $names }}{{ fail (printf "%s two models with this name (or whose names begin alike for 36 characters)" $at) }}{{ end }}
{{- $names = append $names $m.base }}
{{- if $m.together }}
{{- if $m.sleeps }}{{ fail (printf "%s gateway.shared sees no requests of one model alone: settings.load_on_demand and unload_idle_s in place of workers.autoscaling.minReplicas 0" $at) }}{{ end }}
{{- $first := include "surestep.model" (dict "root" $ "model" (first $.Values.models)) | fromYaml }}
{{- if ne (include "surestep.gatewayVolume" $first) (include "surestep.gatewayVolume" $m) }}{{ fail (printf "%s gateway.shared needs one volume for all models: modelCache.gateways own, or one existingClaim or hostPath" $at) }}{{ end }}
{{- if $m.guest }}
{{- range $name := ($.Files.Get "files/settings.json" | fromJson).server }}
{{- if hasKey $m.settings $name }}{{ fail (printf "%s settings.%s is the same for all models of a shared gateway: it stands with the first one" $at $name) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- if ne (mod (int $m.ranks) (int $m.pods)) 0 }}{{ fail (printf "%s tensorParallelSize %d cannot be spread evenly over podsPerReplica %d" $at (int $m.ranks) (int $m.pods)) }}{{ end }}
{{- if regexMatch "^[0-9]" $m.base }}{{ fail (printf "the release is called %s, and names of Services begin with a letter: set fullnameOverride" $.Release.Name) }}{{ end }}
{{- if and $m.scaled (gt (int $m.workers.autoscaling.minReplicas) (int $m.workers.autoscaling.maxReplicas)) }}{{ fail (printf "%s workers.autoscaling.minReplicas is above maxReplicas" $at) }}{{ end }}
{{- with $m.gateway.rollingUpdate }}
{{- if and (eq (toString .maxSurge | trimSuffix "%") "0") (eq (toString .maxUnavailable | trimSuffix "%") "0") }}{{ fail (printf "%s gateway.rollingUpdate with maxSurge and maxUnavailable 0 replaces no pod" $at) }}{{ end }}
{{- end }}
{{- with $m.gateway }}{{ if .autoscaling.enabled }}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) }}{{ fail (printf "%s gateway.autoscaling.minReplicas is above maxReplicas" $at) }}{{ end }}
{{- if not (hasKey (default dict .resources.requests) "cpu") }}{{ fail (printf "%s gateway.autoscaling measures the CPU by gateway.resources.requests.cpu, which is not there" $at) }}{{ end }}
{{- end }}{{ end }}
{{- if and (ne $.Values.monitoring.kind "none") (get $m.settings "protect_metrics") (not $.Values.adminKey.existingSecret) }}{{ fail (printf "%s settings.protect_metrics: Prometheus needs a key, which is that of adminKey.existingSecret" $at) }}{{ end }}
{{- if and $m.scaled (eq $m.kind "Deployment") }}{{ fail (printf "%s workers.autoscaling needs workers.kind StatefulSet or LeaderWorkerSet" $at) }}{{ end }}
{{- if and $m.scaled (gt (int $m.pods) 1) (ne $m.kind "LeaderWorkerSet") }}{{ fail (printf "%s workers.autoscaling with podsPerReplica %d needs workers.kind LeaderWorkerSet: a StatefulSet is scaled by pods, not by replicas" $at (int $m.pods)) }}{{ end }}
{{- if and $m.sleeps (eq $m.workers.autoscaling.kind "hpa") }}{{ fail (printf "%s workers.autoscaling.minReplicas 0 needs workers.autoscaling.kind keda: an HPA keeps one" $at) }}{{ end }}
{{- if and (eq $m.workers.autoscaling.kind "hpa") (semverCompare "<1.23.0-0" $.Capabilities.KubeVersion.Version) }}{{ fail (printf "%s workers.autoscaling.kind hpa needs Kubernetes 1.23 (autoscaling/v2)" $at) }}{{ end }}
{{- if and $m.gateway.autoscaling.enabled (semverCompare "<1.23.0-0" $.Capabilities.KubeVersion.Version) }}{{ fail (printf "%s gateway.autoscaling needs Kubernetes 1.23 (autoscaling/v2)" $at) }}{{ end }}
{{- if and (eq $m.modelCache.kind "hostPath") (not $m.modelCache.hostPath) }}{{ fail (printf "%s modelCache.kind hostPath needs modelCache.hostPath" $at) }}{{ end }}
{{- if and (eq $m.modelCache.kind "emptyDir") (hasPrefix "/" $m.source) }}{{ fail (printf "%s source %s is a folder, and modelCache.kind emptyDir is empty at the start: a hub id, or another kind" $at $m.source) }}{{ end }}
{{- if and (hasPrefix "/" $m.source) (not (hasPrefix "/models/" $m.source)) }}{{ fail (printf "%s source %s: folders are those of the model volume, which is mounted at /models" $at $m.source) }}{{ end }}
{{- end }}
{{- end }}
