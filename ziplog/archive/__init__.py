"""The client of a storage server's archive: whole blocks of records, as they lie on disk."""
