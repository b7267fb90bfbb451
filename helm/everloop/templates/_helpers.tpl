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
- name: EVERLOOP_NAMESPACES
  value: {{ join "," .Values.operator.namespaces | quote }}
- name: EVERLOOP_METRICS
  value: {{ .Values.metrics.enabled | quote }}
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
{{- $inside := printf "http://everloop-gateway.%s:8000" .Release.Namespace }}
{{- $scheme := ternary "https" "http" (not (empty .Values.ingress.tlsSecretName)) }}
{{- $outside := ternary (printf "%s://%s" $scheme .Values.ingress.host) $inside .Values.ingress.enabled }}
{{- .Values.gateway.endpoint | default $outside }}
{{- end }}

{{/*
Rights in every namespace with sessions: a ClusterRole, or a Role in each of operator.namespaces, bound to the
component's account. Called with (list component rules root), rules as YAML.
*/}}
{{- define "everloop.rights" -}}
{{- $component := index . 0 }}
{{- $rules := index . 1 }}
{{- $root := index . 2 }}
{{- $kind := ternary "Role" "ClusterRole" (not (empty $root.Values.operator.namespaces)) }}
{{- range $namespace := $root.Values.operator.namespaces | default (list "") }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}
metadata:
  name: everloop-{{ $component }}{{ if $namespace }}-sessions{{ end }}
  {{- with $namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "everloop.labels" $root | nindent 4 }}
rules: {{- $rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}Binding
metadata:
  name: everloop-{{ $component }}{{ if $namespace }}-sessions{{ end }}
  {{- with $namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "everloop.labels" $root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ $kind }}
  name: everloop-{{ $component }}{{ if $namespace }}-sessions{{ end }}
subjects:
  - kind: ServiceAccount
    name: everloop-{{ $component }}
    namespace: {{ $root.Release.Namespace }}
{{- end }}
{{- end }}

{{/* Rights on what belongs to no namespace. Called with (list component suffix rules root), rules as YAML. */}}
{{- define "everloop.clusterRights" -}}
{{- $name := printf "everloop-%s-%s" (index . 0) (index . 1) }}
{{- $root := index . 3 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $name }}
  labels: {{- include "everloop.labels" $root | nindent 4 }}
rules: {{- index . 2 | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $name }}
  labels: {{- include "everloop.labels" $root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ $name }}
subjects:
  - kind: ServiceAccount
    name: everloop-{{ index . 0 }}
    namespace: {{ $root.Release.Namespace }}
{{- end }}
