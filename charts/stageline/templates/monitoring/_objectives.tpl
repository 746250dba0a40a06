{{/* What can be promised, by its field of `monitoring.objectives`; in snake case it is what the rules call it. */}}
{{- define "stageline.objectives" -}}
{{- list "firstTokenSeconds" "outputTokenSeconds" "slowRequestRatio" "failedRequestRatio" | toJson -}}
{{- end -}}

{{/* What the schema can't refuse: two entries for one model, whose series would clash, and one of nothing but names. */}}
{{- define "stageline.checkObjectivesPerModel" -}}
{{- $fields := include "stageline.objectives" . | fromJsonArray -}}
{{- $seen := dict -}}
{{- range $index, $own := .Values.monitoring.objectives.perModel -}}
{{- $model := printf "%s in namespace %s" $own.modelName $own.namespace -}}
{{- if hasKey $seen $model -}}
{{- fail (printf "monitoring.objectives.perModel[%d]: %s has an entry already, perModel[%d]: make them one" $index $model (get $seen $model)) -}}
{{- end -}}
{{- if eq (len $own) 2 -}}
{{- fail (printf "monitoring.objectives.perModel[%d]: nothing is promised for %s: give one or more of %s" $index $model (join ", " $fields)) -}}
{{- end -}}
{{- $_ := set $seen $model $index -}}
{{- end -}}
{{- end -}}

{{/* PromQL of the models that have an objective of their own, as the beginning of a rule's expression: an `or` comes after
each. It is of that model in every cluster, and without one before its first request. The schema allows no character in
names that would have to be escaped. Arguments: root, field. */}}
{{- define "stageline.objectivesPerModel" -}}
{{- $field := .field -}}
{{- range .root.Values.monitoring.objectives.perModel -}}
{{- if hasKey . $field }}
          {{ get . $field }} * group by (cluster, namespace, model_name) (
            stageline_gateway_requests_total{namespace="{{ .namespace }}", model_name="{{ .modelName }}"}
            or
            model:stageline_gateway_requests:increase20m{namespace="{{ .namespace }}", model_name="{{ .modelName }}"}
            or
            model:stageline_gateway_requests:increase3d{namespace="{{ .namespace }}", model_name="{{ .modelName }}"}
          )
          or
          label_replace(
            label_replace(vector({{ get . $field }}), "namespace", "{{ .namespace }}", "", ""),
            "model_name", "{{ .modelName }}", "", ""
          )
          or
{{- end -}}
{{- end -}}
{{- end -}}
