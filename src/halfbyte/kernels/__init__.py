"""One folder per operation: `config.py` (records and legality), `source.py`, and device code."""
