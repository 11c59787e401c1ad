"""Makes prompts from recorded tokens for harnesses that send text: the call forest, matching, bridging and parsing."""
