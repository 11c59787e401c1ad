"""The record as datasets, and foreign traces as records: what stands between the stores and the exporters."""
