"""Ops with a schema, a plain torch reference and, where a library is built, a native kernel."""
