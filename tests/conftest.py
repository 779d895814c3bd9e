"""Fails early, with the remedy, when xds is not installed in this environment."""

try:
    import xds  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise SystemExit(
        "xds is not installed here: run `pip install -c constraints.txt -e .[test]` first"
    ) from error
