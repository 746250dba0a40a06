"""Between files and types: manifests read and refused, the CRD and its field reference written."""
