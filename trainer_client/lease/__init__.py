"""TODO: what this room holds."""
