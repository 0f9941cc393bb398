-- The transaction that has been under way for longest of those that may still write events; under strict order
-- it holds back all events with newer ids. Its start is shown only to who may see it.
SELECT l.pid, extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS age_seconds
FROM pg_catalog.pg_locks l
LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.relation = '{{outbox}}'::regclass AND l.mode = 'RowExclusiveLock' AND l.granted
  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
  AND l.pid IS DISTINCT FROM pg_backend_pid()
ORDER BY a.xact_start NULLS FIRST
LIMIT 1
