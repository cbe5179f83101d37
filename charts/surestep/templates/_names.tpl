{{- define "surestep.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 36 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}{{ .Release.Name | trunc 36 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 36 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "surestep.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "surestep.fullname" .) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "surestep.grpcSecretName" -}}
{{- default (printf "%s-grpc" (include "surestep.fullname" .)) .Values.grpcSecret.existingSecret }}
{{- end }}

{{- define "surestep.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: surestep
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Labels that select pods. Arguments: root, base, component. */}}
{{- define "surestep.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
surestep.dev/model: {{ .base }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- /* Name and labels of an object of a model. Arguments: root, base, component, name. */}}
{{- define "surestep.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "surestep.selector" . | nindent 2 }}
  {{- include "surestep.labels" .root | nindent 2 }}
{{- end }}

{{- define "surestep.image" -}}
{{- $image := .image }}{{ $all := .root.Values.image }}
{{- with $all.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ coalesce $image.tag $all.tag .root.Chart.AppVersion }}{{ end }}
{{- end }}
