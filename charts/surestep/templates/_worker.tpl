{{- /* Labels of one pod's Deployment. Arguments: replica, pod. */}}
{{- define "surestep.place" -}}
surestep.dev/replica: {{ .replica | quote }}
surestep.dev/pod: {{ .pod | quote }}
{{- end }}

{{- /* The pod template of workers. Arguments: root, m, about; of a Deployment: replica, pod. */}}
{{- define "surestep.workerPod" -}}
{{- $m := .m }}{{ $w := $m.workers }}{{ $root := .root }}
{{- $cuda := eq $w.device "cuda" }}
{{- $k := int $m.ranksPerPod }}
{{- $resources := deepCopy $w.resources }}
{{- if $cuda }}
{{- $_ := set $resources "limits" (merge (dict $w.gpuResource $k) (default dict $resources.limits)) }}
{{- end }}
{{- $limits := default dict $resources.limits }}
{{- $shm := default (ternary "8Gi" "" (and $cuda (gt $k 1))) $w.sharedMemory }}
metadata:
  labels:
    {{- include "surestep.selector" .about | nindent 4 }}
    {{- if eq $m.kind "Deployment" }}
    {{- include "surestep.place" . | nindent 4 }}
    {{- end }}
    {{- include "surestep.podLabels" $root | nindent 4 }}
    {{- with $w.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/settings: {{ include "surestep.settings" (dict "root" $root "m" $m "service" "worker") | sha256sum }}
    {{- with $w.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "surestep.podSpec" (dict "root" $root "part" $w "about" .about) | nindent 2 }}
  {{- with $w.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- $tolerations := $w.tolerations }}
  {{- if $cuda }}{{ $tolerations = append $tolerations (dict "key" $w.gpuResource "operator" "Exists" "effect" "NoSchedule") }}{{ end }}
  {{- with $tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ int $w.terminationGracePeriodSeconds }}
  {{- if or $m.fetched $w.initContainers }}
  initContainers:
    {{- with $w.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- if $m.fetched }}
    {{- include "surestep.fetch" (dict "root" $root "m" $m "image" $w.image "textOnly" false "makes" (ternary "/models/.kernels" "" $cuda) "env" $w.env) | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      {{- include "surestep.container" (dict "root" $root "image" $w.image) | nindent 6 }}
      {{- if or (gt $k 1) (gt (int $m.pods) 1) }}
      # Which of the group's ranks are this pod's. Every pod listens on the same ports: rank r takes port + r.
      command:
        - sh
        - -c
        - |
          {{- if eq $m.kind "StatefulSet" }}
          ordinal=${HOSTNAME##*-}
          group=$((ordinal / {{ $m.pods }})) pod=$((ordinal % {{ $m.pods }}))
          {{- else if eq $m.kind "LeaderWorkerSet" }}
          group=$GROUP_INDEX pod=$WORKER_INDEX
          {{- else }}
          group={{ .replica }} pod={{ .pod }}
          {{- end }}
          rank=$((pod * {{ $k }}))
          {{- if gt (int $m.pods) 1 }}
          master={{ $m.base }}-worker-$group-0
          [ "$pod" = 0 ] && master=$POD_IP
          export SURESTEP_TP_MASTER="$master:50300"
          {{- end }}
          export SURESTEP_RANK=$rank
          export SURESTEP_WORKER_LISTEN=0.0.0.0:$((50100 - rank))
          export SURESTEP_SUPERVISOR_LISTEN=0.0.0.0:$((50200 - rank))
          exec python -m surestep_worker.distributed.local_group
      {{- else }}
      command: [python, -m, surestep_common.watchdog, "127.0.0.1:50200", --, python, -m, surestep_worker]
      {{- end }}
      ports:
        {{- range $j := until $k }}
        - {name: rank-{{ $j }}, containerPort: {{ add 50100 $j }}, protocol: TCP}
        - {name: supervisor-{{ $j }}, containerPort: {{ add 50200 $j }}, protocol: TCP}
        {{- end }}
        {{- if gt (int $m.pods) 1 }}
        - {name: meet, containerPort: 50300, protocol: TCP}
        {{- end }}
      env:
        {{- include "surestep.commonEnv" $root | nindent 8 }}
        - {name: HOME, value: /tmp}
        - {name: HF_HOME, value: /models/huggingface}
        - name: SURESTEP_MODEL
          value: {{ $m.folder | quote }}
        - name: SURESTEP_DEVICE
          value: {{ $w.device }}
        {{- if $cuda }}
        # Compiled kernels lie beside the models, for the next pod, or live with this one.
        - {name: XDG_CACHE_HOME, value: /kernels}
        - {name: TRITON_CACHE_DIR, value: /kernels/triton}
        {{- end }}
        {{- if or (gt $k 1) (gt (int $m.pods) 1) }}
        - name: SURESTEP_TENSOR_PARALLEL_SIZE
          value: {{ $m.ranks | quote }}
        - name: SURESTEP_LOCAL_RANKS
          value: {{ $k | quote }}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- if eq $m.kind "LeaderWorkerSet" }}
        - name: GROUP_INDEX
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
        - name: WORKER_INDEX
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
        {{- end }}
        {{- else }}
        - {name: SURESTEP_WORKER_LISTEN, value: "0.0.0.0:50100"}
        - {name: SURESTEP_SUPERVISOR_LISTEN, value: "0.0.0.0:50200"}
        {{- if and $limits.cpu (not $cuda) (not (hasKey $m.settings "cpu_threads")) }}
        - name: SURESTEP_CPU_THREADS
          valueFrom: {resourceFieldRef: {containerName: worker, resource: limits.cpu}}
        {{- end }}
        {{- end }}
        {{- with $w.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- include "surestep.containerExtras" $w | nindent 6 }}
      resources:
        {{- include "surestep.resources" $resources | nindent 8 }}
      {{- if eq $m.kind "Deployment" }}
      # Ready is who answers, so that its Service finds it, and never the pod that it replaces. That the model is
      # loaded is seen at the gateway; that loading goes on is watched by the supervisor.
      readinessProbe:
        tcpSocket: {port: supervisor-0}
        periodSeconds: 1
        failureThreshold: 10
      {{- else }}
      startupProbe:
        {{- include "surestep.rankProbe" $m | nindent 8 }}
        failureThreshold: {{ div (int $w.startupSeconds) (include "surestep.probePeriod" $m | int) }}
      readinessProbe:
        {{- include "surestep.rankProbe" $m | nindent 8 }}
        failureThreshold: 3
      {{- end }}
      # A rank that ends is brought back by its supervisor: no reason to start the container again.
      livenessProbe:
        {{- include "surestep.liveProbe" (dict "m" $m "port" 50200) | nindent 8 }}
      volumeMounts:
        {{- include "surestep.commonMounts" $root | nindent 8 }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- if $cuda }}
        - {{ ternary "{name: models, mountPath: /kernels, subPath: .kernels}" "{name: kernels, mountPath: /kernels}" $m.fetched }}
        {{- end }}
        {{- if $shm }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- with $w.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $w.containers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "surestep.commonVolumes" (dict "root" $root "m" $m "service" "worker") | nindent 4 }}
    {{- include "surestep.modelVolume" $m | nindent 4 }}
    {{- if and $cuda (not $m.fetched) }}
    - name: kernels
      emptyDir: {sizeLimit: 2Gi}
    {{- end }}
    {{- if $shm }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $shm | quote }}}
    {{- end }}
    {{- with $w.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
