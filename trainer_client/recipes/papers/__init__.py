"""Methods of the field, a file a paper; `presets` has those that are only settings."""
