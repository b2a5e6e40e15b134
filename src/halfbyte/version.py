"""The one place that states the version; read by the build and by `halfbyte --version`."""

__version__ = "0.1.0"
