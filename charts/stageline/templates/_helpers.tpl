{{/* Common part of object names. */}}
{{- define "stageline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of what the whole cluster shares; two releases of one name may live in two namespaces. */}}
{{- define "stageline.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "stageline.fullname" .) -}}
{{- end -}}

{{/* What selects the pods of a component; never changes. Models' network policies know the gateway and the operator by
the first and the last, so these are not made from overrides. Arguments: root, component. */}}
{{- define "stageline.selectorLabels" -}}
app.kubernetes.io/name: stageline
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "stageline.labels" -}}
{{ include "stageline.selectorLabels" . }}
app.kubernetes.io/part-of: stageline
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | quote }}
{{- end -}}

{{/* Labels and annotations of an object. Arguments: root, component, and optionally labels and annotations. */}}
{{- define "stageline.metadata" -}}
labels:
  {{- include "stageline.labels" . | nindent 2 }}
  {{- with merge (dict) (default dict .labels) .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default dict .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Reference of an image. Arguments: root, name. */}}
{{- define "stageline.image" -}}
{{- $image := get .root.Values.images .name -}}
{{- $repository := $image.repository -}}
{{- if .root.Values.images.registry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .root.Values.images.registry) $image.repository -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Name of a component's ServiceAccount. Arguments: root, component. */}}
{{- define "stageline.serviceAccountName" -}}
{{- $account := (get .root.Values .component).serviceAccount -}}
{{- if $account.name -}}
{{- $account.name -}}
{{- else if $account.create -}}
{{- printf "%s-%s" (include "stageline.fullname" .root) .component -}}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{/* Namespaces whose models the gateway serves, as a JSON list; `gateway.namespace` is an older value for one. */}}
{{- define "stageline.gatewayNamespaces" -}}
{{- $gateway := .Values.gateway -}}
{{- if and $gateway.namespace $gateway.namespaces -}}
{{- fail (printf "gateway.namespace: %q is given beside gateway.namespaces: name all of them there" $gateway.namespace) -}}
{{- end -}}
{{- $gateway.namespaces | default (list (default .Release.Namespace $gateway.namespace)) | uniq | toJson -}}
{{- end -}}

{{/* What the gateway's metrics that are of no model are labelled with: the namespace that it serves, its own where it
serves several. */}}
{{- define "stageline.gatewayHome" -}}
{{- $namespaces := include "stageline.gatewayNamespaces" . | fromJsonArray -}}
{{- ternary (first $namespaces) .Release.Namespace (eq (len $namespaces) 1) -}}
{{- end -}}

{{/* Whether objects of another project's CRD are rendered. Arguments: root, wish (auto, always, never), kind. */}}
{{- define "stageline.rendersMonitoring" -}}
{{- if or (eq .wish "always") (and (eq .wish "auto") (.root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind))) -}}
true
{{- end -}}
{{- end -}}

{{/* Fields of a pod's spec that operator and gateway have alike. Arguments: root, component. */}}
{{- define "stageline.podSpec" -}}
{{- $settings := get .root.Values .component -}}
serviceAccountName: {{ include "stageline.serviceAccountName" . }}
automountServiceAccountToken: true
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
# The user is the image's own (10001), so that a cluster may give it another.
securityContext:
  runAsNonRoot: true
  seccompProfile:
    type: RuntimeDefault
{{- with $settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
tolerations:
  {{- with $settings.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- range tuple "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" }}
  - key: {{ . }}
    operator: Exists
    effect: NoExecute
    # A null, as values of an earlier chart leave it, would be for ever.
    tolerationSeconds: {{ ternary 30 $settings.nodeLostSeconds (kindIs "invalid" $settings.nodeLostSeconds) }}
  {{- end }}
{{- with $settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  {{- if $settings.topologySpreadConstraints }}
  {{- toYaml $settings.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  {{- $labels := include "stageline.selectorLabels" . }}
  {{- range tuple "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- $labels | nindent 8 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Fields of a container that operator and gateway have alike. Arguments: root, component. */}}
{{- define "stageline.container" -}}
{{- $settings := get .root.Values .component -}}
name: {{ .component }}
image: {{ include "stageline.image" (dict "root" .root "name" .component) | quote }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
command: ["stageline", {{ .component | quote }}]
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop: ["ALL"]
  seccompProfile:
    type: RuntimeDefault
terminationMessagePolicy: FallbackToLogsOnError
resources:
  {{- toYaml $settings.resources | nindent 2 }}
env:
  - name: POD_NAME
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  - name: POD_NAMESPACE
    valueFrom:
      fieldRef:
        fieldPath: metadata.namespace
  - name: POD_IP
    valueFrom:
      fieldRef:
        fieldPath: status.podIP
  # The root file system is read-only; these point to a volume.
  - name: HOME
    value: /tmp
  - name: TMPDIR
    value: /tmp
  {{- if eq .component "gateway" }}
  {{- range $name, $value := include "stageline.tracingEnv" .root | fromYaml }}
  - name: {{ $name }}
    value: {{ $value | quote }}
  {{- end }}
  {{- end }}
  {{- with $settings.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* OpenTelemetry's variables for the gateway and, by the operator, for engines; an empty object without a collector. */}}
{{- define "stageline.tracingEnv" -}}
{{- if .Values.tracing.endpoint -}}
{{- merge (dict) .Values.tracing.env (dict "OTEL_EXPORTER_OTLP_ENDPOINT" .Values.tracing.endpoint) | toYaml -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{/* Metadata of a component's pods; without versions, so that a new chart alone restarts nothing. Arguments: root,
component. */}}
{{- define "stageline.podMetadata" -}}
{{- $settings := get .root.Values .component -}}
labels:
  {{- include "stageline.selectorLabels" . | nindent 2 }}
  app.kubernetes.io/part-of: stageline
  {{- with merge (dict) $settings.podLabels .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $settings.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
