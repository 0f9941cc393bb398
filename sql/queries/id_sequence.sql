-- The sequence that ids are drawn from, and how many a session draws ahead. No row: there is none.
SELECT s.seqrelid::regclass::text AS name, s.seqcache AS cache
FROM pg_catalog.pg_sequence s
WHERE s.seqrelid = pg_catalog.pg_get_serial_sequence('{{outbox}}', 'id')::regclass
