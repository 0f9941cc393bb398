-- What an operator asks first: how much waits, since when, and why. Counts stop at $1: never a scan
-- of the whole backlog.
--
-- The oldest is the event that has been due for longest: one that was never tried from the time it is
-- scheduled for, any other from when it was written. It is one of three, each had from an index of its own:
-- the first of those never tried, of those tried before, and of the few in hand.
WITH waiting AS (
    (SELECT x.*, greatest(x.created_at, x.next_attempt_at) AS due_since
     FROM {{outbox}} x
     WHERE coalesce(x.status = 'pending' AND x.claimed_by IS NULL, false) AND x.attempts = 0 AND x.last_error IS NULL
     ORDER BY x.next_attempt_at
     LIMIT 1)
    UNION ALL
    (SELECT x.*, x.created_at
     FROM {{outbox}} x
     WHERE coalesce(x.status = 'pending' AND x.claimed_by IS NULL AND (x.attempts > 0 OR x.last_error IS NOT NULL), false)
     ORDER BY x.created_at
     LIMIT 1)
    UNION ALL
    (SELECT x.*, CASE WHEN x.attempts = 0 AND x.last_error IS NULL THEN greatest(x.created_at, x.next_attempt_at)
                      ELSE x.created_at END AS due_since
     FROM {{outbox}} x
     WHERE x.status = 'pending' AND x.claimed_by IS NOT NULL
     ORDER BY due_since
     LIMIT 1)
)
SELECT least($1::int,
             (SELECT count(*) FROM (SELECT FROM {{outbox}}
                                    WHERE coalesce(status = 'pending' AND claimed_by IS NULL, false) LIMIT $1::int) p)
             + (SELECT count(*) FROM (SELECT FROM {{outbox}}
                                      WHERE status = 'pending' AND claimed_by IS NOT NULL LIMIT $1::int) h))::bigint AS pending,
       (SELECT count(*) FROM (SELECT FROM {{outbox}} WHERE coalesce(status = 'dead', false) LIMIT $1::int) d)::bigint AS dead,
       (SELECT s.lagging FROM {{outbox_relay_state}} s WHERE s.id = 1) AS was_lagging,
       ARRAY(SELECT a.subject FROM {{outbox_alert}} a ORDER BY a.subject LIMIT 100) AS raised,
       (SELECT count(*) FROM {{outbox_replica}} r WHERE r.lease_until > clock_timestamp())::int AS live,
       (SELECT count(*) FROM {{outbox_replica}} r WHERE r.lease_until > clock_timestamp() AND r.ready)::int AS ready,
       o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.attempts, o.last_error, o.claimed_by,
       CASE WHEN isfinite(o.due_since) THEN extract(epoch FROM now() - o.due_since)::float8 END AS age_seconds,
       CASE WHEN NOT isfinite(o.next_attempt_at) THEN 'infinity'::float8
            ELSE extract(epoch FROM o.next_attempt_at - now())::float8 END AS due_in_seconds,
       (SELECT d.id FROM {{outbox}} d
        WHERE d.status = 'dead' AND d.holds IS NOT FALSE
          AND {{outbox_hash_of}}(d.aggregate_type, d.aggregate_id) = {{outbox_hash_of}}(o.aggregate_type, o.aggregate_id)
          AND d.id < o.id
        ORDER BY d.id LIMIT 1) AS behind_dead,
       CASE WHEN f.next_attempt_at > now() THEN f.id END AS behind_later,
       CASE WHEN NOT isfinite(f.next_attempt_at) THEN 'infinity'::float8
            ELSE extract(epoch FROM f.next_attempt_at - now())::float8 END AS later_due_in_seconds
FROM (SELECT) one
LEFT JOIN LATERAL (SELECT * FROM waiting w ORDER BY w.due_since LIMIT 1) o ON true
-- The first of its aggregate that is set aside: it may wait for its time, and the others with it.
LEFT JOIN LATERAL (
    SELECT x.id, x.next_attempt_at
    FROM {{outbox}} x
    WHERE {{outbox_bucket_of}}(x.aggregate_type, x.aggregate_id) = {{outbox_bucket_of}}(o.aggregate_type, o.aggregate_id)
      AND x.status = 'pending' AND x.claimed_by IS NULL
      AND NOT {{outbox_walked}}(x.parked, x.next_attempt_at, x.created_at)
      AND {{outbox_hash_of}}(x.aggregate_type, x.aggregate_id) = {{outbox_hash_of}}(o.aggregate_type, o.aggregate_id)
      AND x.id < o.id
    ORDER BY x.id LIMIT 1
) f ON true
