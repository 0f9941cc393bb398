-- Transactions that may have written events, prepared ones too: they hold their lock from before the trigger
-- fires until after their rows can be seen.
SELECT l.virtualtransaction
FROM pg_catalog.pg_locks l
WHERE l.locktype = 'relation' AND l.relation = '{{outbox}}'::regclass AND l.mode = 'RowExclusiveLock' AND l.granted
  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
  AND l.pid IS DISTINCT FROM pg_backend_pid()
  AND ($1::text[] IS NULL OR l.virtualtransaction = ANY ($1))
