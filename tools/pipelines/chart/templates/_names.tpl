{{- define "pipelines.labels" -}}
app.kubernetes.io/name: millrace-pipelines
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}
{{- define "pipelines.config" -}}
{{ .Values.config.existingSecret | default (printf "%s-config" .Release.Name) }}
{{- end }}
{{- define "pipelines.pod" -}}
automountServiceAccountToken: false
serviceAccountName: {{ .Release.Name }}-pipelines
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
# A worker ends between two micro-batches: a bulk of its sink is waited for.
terminationGracePeriodSeconds: 120
{{- end }}
{{- define "pipelines.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
