"""Ops with a schema, a plain torch reference and, where a native library is loaded, a native kernel."""
