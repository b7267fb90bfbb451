{{/* Labels of every object. */}}
{{- define "everloop.labels" -}}
app.kubernetes.io/name: everloop
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Labels that pick the pods of one component; called with (list component root). */}}
{{- define "everloop.selector" -}}
app.kubernetes.io/name: everloop
app.kubernetes.io/instance: {{ (index . 1).Release.Name }}
app.kubernetes.io/component: {{ index . 0 }}
{{- end }}

{{/* What a namespace under the restricted Pod Security Standard asks of a pod. */}}
{{- define "everloop.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* ... and of a container. */}}
{{- define "everloop.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Environment of both components. */}}
{{- define "everloop.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: EVERLOOP_RELEASE_NAMESPACE
  value: {{ .Release.Namespace }}
{{- end }}

{{/* Tolerations of one component; called with (list tolerations root). */}}
{{- define "everloop.tolerations" -}}
{{- $root := index . 1 }}
{{- range $condition := list "not-ready" "unreachable" }}
- key: node.kubernetes.io/{{ $condition }}
  operator: Exists
  effect: NoExecute
  tolerationSeconds: {{ $root.Values.evictionSeconds }}
{{- end }}
{{- with index . 0 }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The catalogue as the gateway reads it: without templates that it may not use. */}}
{{- define "everloop.catalogue" -}}
{{- $entries := list }}
{{- range .Values.catalogue }}
{{- $entries = append $entries (ternary . (omit . "sessionTemplate") $.Values.gateway.createSessions) }}
{{- end }}
{{- toJson $entries }}
{{- end }}

{{/* Not empty if there is a template among them. */}}
{{- define "everloop.hasTemplate" -}}
{{- range include "everloop.catalogue" . | fromJsonArray }}
{{- if .sessionTemplate }}yes{{ end }}
{{- end }}
{{- end }}

{{/* Address of the gateway as users are told it. */}}
{{- define "everloop.endpoint" -}}
{{ .Values.gateway.endpoint | default (printf "http://everloop-gateway.%s:8000" .Release.Namespace) }}
{{- end }}
