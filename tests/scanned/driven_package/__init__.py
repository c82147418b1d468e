"""A package whose compiled functions a scan can drive, or cannot, each in its own way."""
