"""The monitor: serves a cluster's state over HTTP to Prometheus, probes and people.

It runs outside the data processes, and reads the status document once a second. However many
scrapers there are, and however slow, the cluster gets one request a second.
"""
