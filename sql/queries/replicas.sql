-- Who holds what.
-- $1 lock class
SELECT r.token, r.name, r.ready,
       extract(epoch FROM clock_timestamp() - r.started_at)::float8 AS up_seconds,
       CASE WHEN isfinite(r.lease_until) THEN extract(epoch FROM r.lease_until - clock_timestamp())::float8 ELSE 0 END AS lease_seconds,
       -- Without a session (0) the lease alone tells.
       r.session_pid = 0 AND r.lease_until > clock_timestamp()
       OR EXISTS (SELECT FROM pg_catalog.pg_locks l
                  WHERE l.locktype = 'advisory' AND l.classid::bigint = $1::int AND l.objid::bigint = r.token
                    AND l.objsubid = 2 AND l.granted AND l.pid = r.session_pid
                    AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d
                                      WHERE d.datname = current_database())) AS connected,
       (SELECT count(*) FROM {{outbox_bucket}} b WHERE b.token = r.token)::int AS buckets
FROM {{outbox_replica}} r
ORDER BY r.token
