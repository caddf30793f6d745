{{- define "millrace.labels" -}}
app.kubernetes.io/name: millrace
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}
{{- define "millrace.config" -}}
{{ .Values.config.existingSecret | default (printf "%s-config" .Release.Name) }}
{{- end }}
{{- define "millrace.pod" -}}
automountServiceAccountToken: false
serviceAccountName: {{ .Values.serviceAccount | default (printf "%s-millrace" .Release.Name) }}
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
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- /* Replicas of one component prefer machines of their own: `dict "root" $ "component" name`. */}}
{{- define "millrace.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        app.kubernetes.io/instance: {{ .root.Release.Name }}
        app.kubernetes.io/component: {{ .component }}
{{- end }}
{{- define "millrace.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
{{- define "millrace.image" -}}
{{ printf "%s%s:%s" .Values.registry .Values.cluster.image (.Values.cluster.tag | default .Chart.AppVersion) | quote }}
{{- end }}
{{- /* What all pods share: where tables, log and catalog are. Logins are in a Secret. */}}
{{- define "millrace.store" -}}
{{- if .Values.store.tables }}
- name: MILLRACE_TABLES
  value: {{ .Values.store.tables | quote }}
- name: MILLRACE_LOG
  value: {{ .Values.store.log | quote }}
- name: MILLRACE_META_STORE
  value: {{ .Values.store.metaStore | quote }}
{{- end }}
{{- range $name, $value := .Values.store.environment }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- with .Values.store.tls }}
- name: MILLRACE_LOG_TLS_CERT
  value: /etc/millrace-tls/tls.crt
- name: MILLRACE_LOG_TLS_KEY
  value: /etc/millrace-tls/tls.key
- name: MILLRACE_LOG_TLS_NAME
  value: {{ .name | quote }}
{{- end }}
{{- end }}
{{- /* A pod of the cluster listens at its own address, which others are told. */}}
{{- define "millrace.member" -}}
- name: MILLRACE_LOG_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{ include "millrace.store" . | trim }}
{{- end }}
{{- define "millrace.secret" -}}
{{- with .Values.store.secret }}
- secretRef: {name: {{ . }}}
{{- end }}
{{- end }}
{{- define "millrace.mounts" -}}
- name: data
  mountPath: /var/lib/millrace
- name: tmp
  mountPath: /tmp
{{- if .Values.store.tls }}
- name: tls
  mountPath: /etc/millrace-tls
  readOnly: true
{{- end }}
{{- end }}
{{- define "millrace.volumes" -}}
# Copies and caches: a pod that comes anew needs nothing of the one before.
- name: data
  emptyDir: {sizeLimit: {{ .Values.cluster.scratch }}}
- name: tmp
  emptyDir: {sizeLimit: 256Mi}
{{- with .Values.store.tls }}
- name: tls
  secret: {secretName: {{ .secret }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* Not empty where all that flows keep lies in the meta store and beside the tables: then pods need no volumes of their own. */}}
{{- define "millrace.shared" -}}
{{- if and .Values.store.tables .Values.store.metaStore }}true{{ end }}
{{- end }}

{{/* The same for the pipelines of the management, which an etcd does not hold. */}}
{{- define "millrace.sharedPipelines" -}}
{{- if and (include "millrace.shared" .) (hasPrefix "mariadb:" .Values.store.metaStore) }}true{{ end }}
{{- end }}
