"""The demo: a million real events through a local cluster, checked on the other side (`run`)."""
