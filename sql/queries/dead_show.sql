-- All that is known of one event, dead or not.
-- $1 id   $2 where to stop counting what it holds back
SELECT o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.status, o.attempts, o.last_error, o.failed_in,
       o.next_attempt_at::text AS next_attempt_at, o.claimed_by,
       o.holds IS NOT FALSE AS holds, o.payload::text AS payload, octet_length(o.payload::text) AS payload_bytes,
       o.headers::text AS headers, o.correlation_id, o.event_id::text AS event_id,
       o.created_at::text AS created_at, o.published_at::text AS published_at,
       CASE WHEN isfinite(o.created_at) THEN extract(epoch FROM now() - o.created_at)::float8 END AS age_seconds,
       (SELECT least(count(*), $2::int)::bigint FROM (
            (SELECT FROM {{outbox}} w
             WHERE {{outbox_bucket_of}}(w.aggregate_type, w.aggregate_id) = {{outbox_bucket_of}}(o.aggregate_type, o.aggregate_id)
               AND {{outbox_hash_of}}(w.aggregate_type, w.aggregate_id) = {{outbox_hash_of}}(o.aggregate_type, o.aggregate_id)
               AND w.status = 'pending' AND w.claimed_by IS NULL AND {{outbox_walked}}(w.parked, w.next_attempt_at, w.created_at)
               AND w.id > o.id
             LIMIT $2::int)
            UNION ALL
            (SELECT FROM {{outbox}} w
             WHERE {{outbox_bucket_of}}(w.aggregate_type, w.aggregate_id) = {{outbox_bucket_of}}(o.aggregate_type, o.aggregate_id)
               AND {{outbox_hash_of}}(w.aggregate_type, w.aggregate_id) = {{outbox_hash_of}}(o.aggregate_type, o.aggregate_id)
               AND w.status = 'pending' AND w.claimed_by IS NULL AND NOT {{outbox_walked}}(w.parked, w.next_attempt_at, w.created_at)
               AND w.id > o.id
             LIMIT $2::int)) later) AS held_back
FROM {{outbox}} o
WHERE o.id = $1
