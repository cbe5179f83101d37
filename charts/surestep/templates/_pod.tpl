{{- /* What all pods have in common. Arguments: root, part (gateway, scheduler or workers of a model), about, token (whether they may ask the API server). */}}
{{- define "surestep.podSpec" -}}
serviceAccountName: {{ include "surestep.serviceAccountName" .root | quote }}
automountServiceAccountToken: {{ default false .token }}
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .part.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml .part.topologySpreadConstraints | nindent 2 }}
{{- else if not .part.affinity }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "surestep.selector" .about | nindent 8 }}
{{- end }}
{{- end }}

{{- /* What the values add to a container. Arguments: envFrom, lifecycle. */}}
{{- define "surestep.containerExtras" -}}
{{- with .envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .lifecycle }}
lifecycle:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Content of Secrets that are there: an upgrade replaces, one by one, the pods that have read an older one. Arguments: root, names. */}}
{{- define "surestep.secretsRead" -}}
{{- range $name := without .names "" }}
{{- with lookup "v1" "Secret" $.root.Release.Namespace $name }}{{ toYaml .data }}{{ end }}
{{- end }}
{{- end }}

{{- /* Image and what a container may. Arguments: root, image. */}}
{{- define "surestep.container" -}}
image: {{ include "surestep.image" . | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
# The last lines of the log are shown by `kubectl describe pod`.
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
{{- end }}

{{- /* Quantities as strings, which is all that server-side apply takes. Arguments: requests, limits. */}}
{{- define "surestep.resources" -}}
{{- $all := dict }}
{{- range $kind, $quantities := . }}
{{- $strings := dict }}
{{- range $name, $quantity := $quantities }}{{ $_ := set $strings $name (toString $quantity) }}{{ end }}
{{- $_ := set $all $kind $strings }}
{{- end }}
{{- toYaml $all }}
{{- end }}

{{- /* That a rank serves. Arguments: m. */}}
{{- define "surestep.rankProbe" -}}
{{- if .exec -}}
exec:
  command: [python, -m, surestep_common.healthcheck, "127.0.0.1:50100"]
timeoutSeconds: 10
{{- else -}}
grpc: {port: 50100}
timeoutSeconds: 3
{{- end }}
periodSeconds: {{ include "surestep.probePeriod" . }}
{{- end }}

{{- define "surestep.probePeriod" -}}
{{- ternary 10 2 .exec }}
{{- end }}

{{- /*
That a gRPC service answers. Without the kubelet's own probes: that it listens, for a program that has to be
started on a busy node is late, and no service should end for that; what hangs is ended by its watchdog. Arguments: m, port.
*/}}
{{- define "surestep.liveProbe" -}}
{{- if .m.exec -}}
tcpSocket: {port: {{ .port }}}
{{- else -}}
grpc: {port: {{ .port }}, service: live}
{{- end }}
initialDelaySeconds: 10
periodSeconds: 5
timeoutSeconds: 5
failureThreshold: 6
{{- end }}

{{- define "surestep.commonEnv" -}}
- name: SURESTEP_CONFIG
  value: /etc/surestep/settings.yaml
- name: SURESTEP_GRPC_SECRET_FILE
  value: /secrets/grpc/secret
{{- end }}

{{- /* Arguments: root, m, service. */}}
{{- define "surestep.commonVolumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .root.Values.emptyDirs.tmp | quote }}}
- name: settings
  configMap:
    name: {{ .m.base }}-settings
    items:
      - key: {{ .service }}.yaml
        path: settings.yaml
- name: grpc-secret
  secret:
    secretName: {{ include "surestep.grpcSecretName" .root | quote }}
    items:
      - key: {{ .root.Values.grpcSecret.key | quote }}
        path: secret
{{- end }}

{{- define "surestep.commonMounts" -}}
- name: tmp
  mountPath: /tmp
- name: settings
  mountPath: /etc/surestep
  readOnly: true
- name: grpc-secret
  mountPath: /secrets/grpc
  readOnly: true
{{- end }}

{{- /* Arguments: m. */}}
{{- define "surestep.modelVolume" -}}
{{- $cache := .modelCache }}
- name: models
  {{- if eq $cache.kind "emptyDir" }}
  emptyDir: {sizeLimit: {{ $cache.size | quote }}}
  {{- else if eq $cache.kind "hostPath" }}
  hostPath:
    path: {{ $cache.hostPath | quote }}
    type: DirectoryOrCreate
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" .base) $cache.existingClaim | quote }}
  {{- end }}
{{- end }}

{{- /*
Fetches what is missing and lets the link of this model point to it; makes a folder first if there is one to
make. Arguments: root, m, image, textOnly, env; makes, name.
*/}}
{{- define "surestep.fetch" -}}
- name: {{ default "fetch-model" .name }}
  {{- include "surestep.container" . | nindent 2 }}
  {{- if .makes }}
  command: [sh, -c, 'mkdir -p {{ .makes }} && exec "$@"', sh, surestep, fetch, --link, {{ .m.folder | quote }}]
  {{- else }}
  command: [surestep, fetch, --link, {{ .m.folder | quote }}]
  {{- end }}
  args:
    - {{ .m.source | quote }}
    {{- with .m.revision }}
    - --revision
    - {{ . | quote }}
    {{- end }}
    {{- if .textOnly }}
    - --text-only
    {{- end }}
  env:
    - {name: HOME, value: /tmp}
    - {name: XDG_CACHE_HOME, value: /models}
    - {name: HF_HOME, value: /models/huggingface}
    {{- with .root.Values.huggingFaceToken.existingSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ . | quote }}
          key: {{ $.root.Values.huggingFaceToken.key | quote }}
    {{- end }}
    {{- with .env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- include "surestep.resources" .m.modelCache.fetchResources | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: models, mountPath: /models}
{{- end }}
