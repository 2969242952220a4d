"""The demo: a million real events through a local cluster, read back and checked (`run`)."""
