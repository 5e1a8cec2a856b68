{{- define "staged-pool.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "staged-pool.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "staged-pool.selector" -}}
app.kubernetes.io/name: {{ include "staged-pool.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "staged-pool.labels" -}}
{{ include "staged-pool.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "staged-pool.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "staged-pool.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Name of the Secret with the keys of clients; empty if there are none. */}}
{{- define "staged-pool.apiKeysSecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- .Values.apiKeys.existingSecret -}}
{{- else if .Values.apiKeys.values -}}
{{- printf "%s-api-keys" (include "staged-pool.fullname" . | trunc 54 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{/* Lines of TOML for a mapping of texts, numbers, switches and lists: JSON of these is TOML. */}}
{{- define "staged-pool.toml" -}}
{{- range $key, $value := . }}
{{- if not (kindIs "invalid" $value) }}
{{- printf "%s = %s\n" $key (toJson $value) }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "staged-pool.configFile" -}}
# docs/configuration.md explains each key.
{{ include "staged-pool.toml" (omit .Values.config "models") }}
{{- range .Values.config.models }}
[[models]]
{{ include "staged-pool.toml" . }}
{{- end }}
{{- end -}}

{{/* Errors that a schema cannot tell. */}}
{{- define "staged-pool.check" -}}
{{- $claim := .Values.cache.persistence -}}
{{- if and $claim.enabled (eq $claim.accessMode "ReadWriteOnce") (or .Values.autoscaling.enabled (gt (int .Values.replicas) 1)) -}}
{{- fail "cache.persistence.accessMode is ReadWriteOnce, which is for one pod: use ReadWriteMany, or one replica without autoscaling" -}}
{{- end -}}
{{- if and .Values.apiKeys.existingSecret .Values.apiKeys.values -}}
{{- fail "apiKeys.existingSecret stands beside apiKeys.values: keep one of them" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled (include "staged-pool.apiKeysSecret" .) (not .Values.serviceMonitor.keySecret.name) -}}
{{- fail "serviceMonitor.keySecret: /metrics asks for a key, since there are API keys" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas is more than autoscaling.maxReplicas" -}}
{{- end -}}
{{- end -}}
