-- What an operator asks first: how much waits, since when, and why. Counts stop at $1: never a scan
-- of the whole backlog. An event that is scheduled for later is not late.
SELECT (SELECT count(*) FROM (SELECT FROM {{outbox}} WHERE coalesce(status = 'pending', false) LIMIT $1::int) p)::bigint AS pending,
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
        ORDER BY d.id LIMIT 1) AS behind_dead
FROM (SELECT) one
LEFT JOIN LATERAL (
    SELECT x.*, CASE WHEN x.attempts = 0 AND x.last_error IS NULL THEN greatest(x.created_at, x.next_attempt_at) ELSE x.created_at END AS due_since
    FROM {{outbox}} x
    WHERE coalesce(x.status = 'pending', false)
    ORDER BY CASE WHEN x.attempts = 0 AND x.last_error IS NULL THEN greatest(x.created_at, x.next_attempt_at) ELSE x.created_at END
    LIMIT 1
) o ON true
