-- What an operator asks first: how much waits, since when, and why. Counts stop at $1: never a scan
-- of the whole backlog.
SELECT (SELECT count(*) FROM (SELECT FROM {{outbox}} WHERE coalesce(status = 'pending', false) LIMIT $1::int) p)::bigint AS pending,
       (SELECT count(*) FROM (SELECT FROM {{outbox}} WHERE status = 'dead' AND holds IS NOT FALSE LIMIT $1::int) d)::bigint AS dead,
       o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.attempts, o.last_error, o.claimed_by,
       CASE WHEN isfinite(o.created_at) THEN extract(epoch FROM now() - o.created_at)::float8 END AS age_seconds,
       CASE WHEN NOT isfinite(o.next_attempt_at) THEN 'infinity'::float8
            ELSE extract(epoch FROM o.next_attempt_at - now())::float8 END AS due_in_seconds,
       (SELECT d.id FROM {{outbox}} d
        WHERE d.status = 'dead' AND d.holds IS NOT FALSE
          AND {{outbox_hash_of}}(d.aggregate_type, d.aggregate_id) = {{outbox_hash_of}}(o.aggregate_type, o.aggregate_id)
          AND d.id < o.id
        ORDER BY d.id LIMIT 1) AS behind_dead
FROM (SELECT) one
LEFT JOIN LATERAL (SELECT * FROM {{outbox}} WHERE coalesce(status = 'pending', false) ORDER BY id LIMIT 1) o ON true
