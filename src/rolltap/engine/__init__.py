"""The embedded engine: a small model server in its own process, with the token API of the real ones. See README.md."""
