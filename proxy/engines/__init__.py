"""Clients of model servers and vendors."""
