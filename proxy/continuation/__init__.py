"""Token-in, token-out for harnesses that only speak text: the session's forest, matching, bridging and parsing."""
