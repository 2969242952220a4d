"""Measurements of LogDB: contended transactions, YCSB's workloads, restarts, CPU."""
