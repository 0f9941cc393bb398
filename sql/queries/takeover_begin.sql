-- Takeover, first statement: is the replica really dead? Then its lease is ended for good, so that
-- it cannot renew any more. Without a session (0) only the lease tells. Nobody waits here: a row that
-- is locked is being renewed or taken over.
-- $1 dead token   $2 lock class   $3 it is our own old one: we know that it is void
WITH dead AS MATERIALIZED (
    SELECT r.token FROM {{outbox_replica}} r
    WHERE r.token = $1
      AND ($3 OR r.lease_until <= clock_timestamp()
           OR r.session_pid <> 0
              AND NOT EXISTS (SELECT FROM pg_catalog.pg_locks l
                              WHERE l.locktype = 'advisory' AND l.classid::bigint = $2::int
                                AND l.objid::bigint = r.token AND l.objsubid = 2 AND l.granted
                                AND l.pid = r.session_pid
                                AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d
                                                  WHERE d.datname = current_database())))
    FOR UPDATE SKIP LOCKED
)
UPDATE {{outbox_replica}} SET lease_until = '-infinity'
WHERE token = (SELECT d.token FROM dead d)
RETURNING name
