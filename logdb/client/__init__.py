"""The client of LogDB: a deterministic core, and the blocking and the asyncio API on it."""
