{{- define "streamadv.fullname" -}}
{{- if contains "streamadv" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-streamadv" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* Arguments: root, component. */ -}}
{{- define "streamadv.selector" -}}
app.kubernetes.io/name: streamadv
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "streamadv.labels" -}}
{{ include "streamadv.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- /* Arguments: image, tag (the default). */ -}}
{{- define "streamadv.image" -}}
{{ .image.repository }}{{ if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .tag }}{{ end }}
{{- end }}

{{- define "streamadv.checks" -}}
{{- $ways := list }}
{{- if .Values.server.url }}{{ $ways = append $ways "server.url" }}{{ end }}
{{- if .Values.server.urlSecret.name }}{{ $ways = append $ways "server.urlSecret.name" }}{{ end }}
{{- if .Values.valkey.enabled }}{{ $ways = append $ways "valkey.enabled" }}{{ end }}
{{- if ne (len $ways) 1 }}
{{- fail (printf "set exactly one of server.url, server.urlSecret.name and valkey.enabled; set now: %s" (join ", " $ways | default "none")) }}
{{- end }}
{{- if and .Values.valkey.enabled (not .Values.valkey.aclSecret.name) (not .Values.valkey.withoutUsers) }}
{{- fail "valkey.aclSecret.name is empty: name a secret with users.acl (streamadv config acl prints its lines), or set valkey.withoutUsers" }}
{{- end }}
{{- if and .Values.valkey.enabled .Values.valkey.aclSecret.name (not .Values.server.passwordSecret.name) }}
{{- fail "server.passwordSecret.name is empty: name the secret with the password of server.user" }}
{{- end }}
{{- if and .Values.valkey.enabled .Values.valkey.aclSecret.name .Values.valkey.exporter.enabled (not .Values.valkey.exporter.passwordSecret.name) }}
{{- fail "valkey.exporter.passwordSecret.name is empty: name the secret with the password of valkey.exporter.user, or set valkey.exporter.enabled to false" }}
{{- end }}
{{- if and .Values.exporter.passwordSecret.name .Values.server.urlSecret.name }}
{{- fail "exporter.passwordSecret.name is set and server.urlSecret has the user: give server.url, or leave it empty" }}
{{- end }}
{{- if and .Values.valkey.tlsAuthClients (not .Values.server.tls.clientSecret.name) }}
{{- fail "valkey.tlsAuthClients asks for client certificates: name one in server.tls.clientSecret.name" }}
{{- end }}
{{- if and .Values.advantage.gpu.count (eq .Values.advantage.device "cpu") }}
{{- fail "advantage.device is cpu and advantage.gpu.count is not 0: change one" }}
{{- end }}
{{- range prepend .Values.scorers .Values.advantage }}
{{- with .autoscaling }}
{{- if .enabled }}
{{- if not $.Values.prometheus.address }}
{{- fail "autoscaling asks Prometheus: set prometheus.address" }}
{{- end }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- $names := list }}
{{- range .Values.scorers }}{{ $names = append $names .name }}{{ end }}
{{- if ne (len $names) (len (uniq $names)) }}
{{- fail (printf "scorers have the same name twice: %s" (join ", " $names)) }}
{{- end }}
{{- end }}

{{- define "streamadv.url" -}}
{{- if .Values.valkey.enabled -}}
{{- $tls := .Values.valkey.tlsSecret.name -}}
redis{{ if $tls }}s{{ end }}://{{ if .Values.valkey.aclSecret.name }}{{ .Values.server.user }}@{{ end }}{{ include "streamadv.fullname" . }}-valkey:{{ ternary 6380 6379 (not (empty $tls)) }}/0
{{- else -}}
{{ .Values.server.url }}
{{- end -}}
{{- end }}

{{- /* The flags of the run's settings, with the scorers; nothing without any. */ -}}
{{- define "streamadv.runFlags" -}}
{{- $settings := deepCopy .Values.runSettings }}
{{- if .Values.scorers }}
{{- $names := list }}
{{- range .Values.scorers }}{{ $names = append $names .name }}{{ end }}
{{- $_ := set $settings "scorers" $names }}
{{- end }}
{{- range $name, $value := $settings }}
{{- $flag := $name | replace "_" "-" }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $flag }}
{{- else if kindIs "slice" $value }}
- --{{ $flag }}={{ join "," $value }}
{{- else if kindIs "float64" $value }}
- {{ printf "--%s=%v" $flag (ternary (int64 $value) $value (eq (float64 (int64 $value)) $value)) | quote }}
{{- else }}
- {{ printf "--%s=%v" $flag $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- /* What every container of a pod has. Arguments: root, own, server, url. */ -}}
{{- define "streamadv.place" -}}
env:
  - name: STREAMADV_REDIS_URL
    {{- if .server.urlSecret.name }}
    valueFrom: {secretKeyRef: {name: {{ .server.urlSecret.name }}, key: {{ .server.urlSecret.key }}}}
    {{- else }}
    value: {{ .url | quote }}
    {{- end }}
  - {name: STREAMADV_RUN, value: {{ .root.Values.run | quote }}}
  - {name: STREAMADV_LOG_LEVEL, value: {{ .root.Values.logLevel }}}
  - {name: STREAMADV_LOG_FORMAT, value: {{ .root.Values.logFormat }}}
  - {name: STREAMADV_METRICS_HOST, value: 0.0.0.0}
  - {name: STREAMADV_METRICS_PORT, value: "9100"}
  {{- with .server.passwordSecret }}
  {{- if .name }}
  - {name: STREAMADV_REDIS_PASSWORD_FILE, value: /secrets/password/{{ .key }}}
  {{- end }}
  {{- end }}
  {{- with .server.tls.caSecret }}
  {{- if .name }}
  - {name: STREAMADV_TLS_CA_FILE, value: /secrets/ca/{{ .key }}}
  {{- end }}
  {{- end }}
  {{- with .server.tls.clientSecret }}
  {{- if .name }}
  - {name: STREAMADV_TLS_CERT_FILE, value: /secrets/client/{{ .certKey }}}
  - {name: STREAMADV_TLS_KEY_FILE, value: /secrets/client/{{ .keyKey }}}
  {{- end }}
  {{- end }}
  {{- with .own.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if .server.passwordSecret.name }}
  - {name: password, mountPath: /secrets/password, readOnly: true}
  {{- end }}
  {{- if .server.tls.caSecret.name }}
  - {name: ca, mountPath: /secrets/ca, readOnly: true}
  {{- end }}
  {{- if .server.tls.clientSecret.name }}
  - {name: client, mountPath: /secrets/client, readOnly: true}
  {{- end }}
  {{- with .own.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- /*
A Deployment of one kind of process. Arguments: root, component, own (its values), image, args, settings (flags of
`streamadv runs create`, which then runs first), scaled (no replicas: somebody else sets them), login (user and
passwordSecret in place of the server's).
*/ -}}
{{- define "streamadv.deployment" -}}
{{- $root := .root }}
{{- $server := mergeOverwrite (deepCopy $root.Values.server) (.login | default dict) }}
{{- $url := include "streamadv.url" $root }}
{{- if .login }}{{ $url = regexReplaceAllLiteral "//([^/@]*@)?" $url (printf "//%s@" .login.user) }}{{ end }}
{{- $own := .own }}
{{- $place := include "streamadv.place" (dict "root" $root "own" $own "server" $server "url" $url) }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "streamadv.fullname" $root }}-{{ .component }}
  labels: {{- include "streamadv.labels" . | nindent 4 }}
spec:
  {{- if not .scaled }}
  replicas: {{ $own.replicas | default 1 }}
  {{- end }}
  # A worker more than there is room for would wait for a device; one less is a pause of seconds.
  strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}
  selector:
    matchLabels: {{- include "streamadv.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "streamadv.labels" . | nindent 8 }}
      {{- with $own.podAnnotations }}
      annotations: {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false  # its variables would look like settings
      terminationGracePeriodSeconds: {{ $root.Values.terminationGracePeriodSeconds }}
      securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 8 }}
      {{- with $root.Values.images.pullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $own.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- with .settings }}
      initContainers:
        - name: settings
          image: {{ $.image | quote }}
          imagePullPolicy: {{ $root.Values.images.pullPolicy }}
          args:
            - runs
            - create
            - --wait=60
            {{- . | nindent 12 }}
          resources: {{- toYaml $own.resources | nindent 12 }}
          {{- $place | nindent 10 }}
      {{- end }}
      containers:
        - name: {{ .component }}
          image: {{ .image | quote }}
          imagePullPolicy: {{ $root.Values.images.pullPolicy }}
          args: {{- .args | trim | nindent 12 }}
          {{- $place | nindent 10 }}
          ports: [{name: metrics, containerPort: 9100}]
          # It listens once its libraries are loaded; a server that does not answer makes it unready, never restarted.
          startupProbe: {httpGet: {path: /livez, port: metrics}, periodSeconds: 2, failureThreshold: 60}
          livenessProbe: {httpGet: {path: /livez, port: metrics}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
          readinessProbe: {httpGet: {path: /readyz, port: metrics}, periodSeconds: 5, timeoutSeconds: 3}
          {{- $resources := deepCopy $own.resources }}
          {{- with $own.gpu }}
          {{- if .count }}
          {{- $_ := set $resources "limits" (merge (dict .resource .count) ($resources.limits | default dict)) }}
          {{- end }}
          {{- end }}
          resources: {{- toYaml $resources | nindent 12 }}
      volumes:
        - {name: tmp, emptyDir: {sizeLimit: 256Mi}}
        {{- with $server.passwordSecret }}
        {{- if .name }}
        - {name: password, secret: {secretName: {{ .name }}, defaultMode: 0440, items: [{key: {{ .key }}, path: {{ .key }}}]}}
        {{- end }}
        {{- end }}
        {{- with $server.tls.caSecret }}
        {{- if .name }}
        - {name: ca, secret: {secretName: {{ .name }}, defaultMode: 0440, items: [{key: {{ .key }}, path: {{ .key }}}]}}
        {{- end }}
        {{- end }}
        {{- with $server.tls.clientSecret }}
        {{- if .name }}
        - {name: client, secret: {secretName: {{ .name }}, defaultMode: 0440}}
        {{- end }}
        {{- end }}
        {{- with $own.volumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $own.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $own.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $own.affinity }}
      affinity: {{- toYaml . | nindent 8 }}
      {{- end }}
{{- with $own.podDisruptionBudget }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "streamadv.fullname" $root }}-{{ $.component }}
  labels: {{- include "streamadv.labels" $ | nindent 4 }}
spec:
  {{- toYaml . | nindent 2 }}
  selector:
    matchLabels: {{- include "streamadv.selector" $ | nindent 6 }}
{{- end }}
{{- end }}

{{- /* KEDA for a Deployment. Arguments: root, component, stream, scaling. */ -}}
{{- define "streamadv.scaled" -}}
{{- $selector := printf "{run=%q,stream=%q}" .root.Values.run .stream }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ include "streamadv.fullname" .root }}-{{ .component }}
  labels: {{- include "streamadv.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {name: {{ include "streamadv.fullname" .root }}-{{ .component }}}
  minReplicaCount: {{ .scaling.minReplicas }}
  maxReplicaCount: {{ .scaling.maxReplicas }}
  cooldownPeriod: {{ .scaling.cooldownSeconds }}
  # While Prometheus does not answer, or has no such series, it stays at this.
  fallback: {failureThreshold: 3, replicas: {{ max 1 (int .scaling.minReplicas) }}}
  triggers:
    {{- range $metric, $threshold := dict "streamadv_run_stream_entries" .scaling.entriesPerReplica "streamadv_run_stream_oldest_seconds" .scaling.secondsPerReplica }}
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ $.root.Values.prometheus.address | quote }}
        query: {{ printf "max(%s%s)" $metric $selector | quote }}
        threshold: {{ $threshold | quote }}
        ignoreNullValues: "false"
    {{- end }}
{{- end }}
