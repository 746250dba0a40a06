"""The archive of `stageline debug-bundle`: its content and its redaction."""
