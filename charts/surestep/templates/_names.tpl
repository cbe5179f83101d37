{{- /* What all names begin with. Services' names have no dots, which those of releases may have. */}}
{{- define "surestep.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- default $full .Values.fullnameOverride | replace "." "-" | trunc 36 | trimAll "-" }}
{{- end }}

{{- define "surestep.serviceAccountName" -}}
{{- default (ternary (include "surestep.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{- define "surestep.grpcSecretName" -}}
{{- default (printf "%s-grpc" (include "surestep.fullname" .)) .Values.grpcSecret.existingSecret }}
{{- end }}

{{- define "surestep.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "surestep.podLabels" . }}
{{- end }}

{{- /* Without versions: for another one of the chart alone no model is loaded again. */}}
{{- define "surestep.podLabels" -}}
app.kubernetes.io/part-of: surestep
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Labels that select pods. Arguments: root, base, component. */}}
{{- define "surestep.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
surestep.dev/model: {{ .base | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- /* Name and labels of an object of a model. Arguments: root, base, component, name. */}}
{{- define "surestep.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "surestep.selector" . | nindent 2 }}
  {{- include "surestep.labels" .root | nindent 2 }}
{{- end }}

{{- define "surestep.image" -}}
{{- $image := .image }}{{ $all := .root.Values.image }}
{{- with $all.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ coalesce $image.tag $all.tag .root.Chart.AppVersion }}{{ end }}
{{- end }}
