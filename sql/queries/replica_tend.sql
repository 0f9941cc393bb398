-- The heartbeat, all in one statement so that an idle relay stays quiet: renew the lease, look for
-- dead peers, count shares, and find out what is due when.
-- $1 token   $2 its name   $3 lease in seconds   $4 lock class   $5 can we publish?
WITH renewed AS (
    -- A lease that is over is not revived: a peer may be taking over.
    UPDATE {{outbox_replica}}
    SET lease_until = clock_timestamp() + make_interval(secs => $3::float8), ready = $5
    WHERE token = $1 AND lease_until > clock_timestamp()
    RETURNING token
), held AS MATERIALIZED (
    SELECT l.objid::bigint AS token, l.pid
    FROM pg_catalog.pg_locks l
    WHERE l.locktype = 'advisory' AND l.classid::bigint = $4::int AND l.objsubid = 2 AND l.granted
      AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
), peer AS MATERIALIZED (
    SELECT r.token, r.ready,
           r.lease_until > clock_timestamp()
           -- Without a session (0) it lives by its lease alone.
           AND (r.session_pid = 0
                OR EXISTS (SELECT FROM held h WHERE h.token = r.token AND h.pid = r.session_pid)) AS alive
    FROM {{outbox_replica}} r
    WHERE r.token <> $1
)
SELECT EXISTS (SELECT FROM renewed) AS renewed,
       ARRAY(SELECT b.bucket FROM {{outbox_bucket}} b WHERE b.token = $1 ORDER BY b.bucket) AS owned,
       (SELECT count(*) FROM {{outbox_bucket}} b WHERE b.token IS NULL)::int AS free,
       (SELECT count(*) FROM peer p WHERE p.alive)::int AS peers,
       (SELECT count(*) FROM peer p WHERE p.alive AND p.ready)::int AS ready_peers,
       ARRAY(SELECT p.token FROM peer p WHERE NOT p.alive) AS dead_peers,
       EXISTS (SELECT FROM {{outbox}} o
               WHERE o.status = 'pending' AND o.claimed_by IS NOT NULL AND o.claimed_by <> $2) AS peers_busy,
       -- Claims that nobody stands for, for example of a relay that the table had before it was adopted.
       EXISTS (SELECT FROM {{outbox}} o
               WHERE o.status = 'pending' AND o.claimed_by IS NOT NULL
                 AND (o.claimed_until IS NULL OR o.claimed_until <= clock_timestamp())
                 AND NOT EXISTS (SELECT FROM {{outbox_replica}} r WHERE r.name = o.claimed_by)) AS strays,
       -- Is there a row in the walk, or one to be promoted? For parked ones it is not for claims to look.
       (SELECT o.id FROM {{outbox}} o
        WHERE o.status = 'pending' AND o.claimed_by IS NULL AND {{outbox_walked}}(o.parked, o.next_attempt_at, o.created_at)
        ORDER BY {{outbox_bucket_of}}(o.aggregate_type, o.aggregate_id),
                 {{outbox_hash_of}}(o.aggregate_type, o.aggregate_id), o.id
        LIMIT 1) IS NOT NULL
       OR EXISTS (SELECT FROM {{outbox_bucket}} b
                  WHERE (SELECT o.id FROM {{outbox}} o
                         WHERE {{outbox_bucket_of}}(o.aggregate_type, o.aggregate_id) = b.bucket
                           AND o.status = 'pending' AND o.claimed_by IS NULL AND o.parked IS NULL
                           AND NOT {{outbox_walked}}(o.parked, o.next_attempt_at, o.created_at)
                           AND o.next_attempt_at <= now()
                         ORDER BY o.next_attempt_at LIMIT 1) IS NOT NULL) AS due,
       -- Is anything parked, in whosever bucket?
       (SELECT o.id FROM {{outbox}} o
        WHERE o.status = 'pending' AND o.claimed_by IS NULL AND o.parked
        ORDER BY {{outbox_bucket_of}}(o.aggregate_type, o.aggregate_id),
                 {{outbox_hash_of}}(o.aggregate_type, o.aggregate_id), o.id
        LIMIT 1) IS NOT NULL AS parked,
       -- For how long writers are still kept from ringing, by whomever.
       (SELECT s.last_value - (extract(epoch FROM clock_timestamp()) * 1000)::bigint
        FROM {{outbox_awake_until}} s) AS awake_ms,
       (SELECT CASE WHEN isfinite(n.next_attempt_at)
                    THEN extract(epoch FROM n.next_attempt_at - clock_timestamp())::float8 END
        FROM (SELECT o.next_attempt_at FROM {{outbox}} o
              WHERE coalesce(o.status = 'pending' AND o.claimed_by IS NULL, false) AND o.next_attempt_at > now()
              ORDER BY o.next_attempt_at LIMIT 1) n) AS next_due_seconds
