"""The monitor: serves a cluster's state over HTTP to Prometheus, probes and people.

It runs outside the data processes. Once a second it reads the status document and the metrics of
each node, every other second it lists the cursors. However many scrapers there are, and however
slow, the cluster gets no further request.
"""
